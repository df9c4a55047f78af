"""Emulated accelerators (layers that take the time of a hardware profile) and emulated networks."""
