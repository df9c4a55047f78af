"""What holds for all tests."""

import signal

# Background jobs of a shell start with Ctrl-C ignored, and so would every launcher that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
