"""``python -m poseidon``: the same as ``poseidon``."""

import sys

from poseidon.cli import main

if __name__ == "__main__":
    sys.exit(main())
