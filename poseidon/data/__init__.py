"""Data sets: functions that give two map-style data sets of (input, target), to train on and to evaluate on."""

from poseidon.data.handwritten import digits, mnist5k
from poseidon.data.noise import synthetic

__all__ = ["digits", "mnist5k", "synthetic"]
