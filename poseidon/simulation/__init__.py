"""A discrete-event simulator of clusters nobody here owns: seconds of an iteration, on the planner's book.

Pure: no sockets, no torch. It answers what an emulated run would measure if its software took no time.
"""

from poseidon.simulation.choose import Choice, cells_to_emulate
from poseidon.simulation.job import Job, Layer, Network, System
from poseidon.simulation.outcome import PARTS, Outcome
from poseidon.simulation.run import simulate

__all__ = [
    "PARTS",
    "Choice",
    "Job",
    "Layer",
    "Network",
    "Outcome",
    "System",
    "cells_to_emulate",
    "simulate",
]
