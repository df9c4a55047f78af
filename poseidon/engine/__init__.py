"""The engine: hooks that notice a final gradient, syncers, and the exchange between threads."""

from poseidon.engine.cuda import CudaCopies
from poseidon.engine.device import Device, Host
from poseidon.engine.downpour import Downpour
from poseidon.engine.engine import Engine
from poseidon.engine.exchange import Exchange
from poseidon.engine.join import join
from poseidon.engine.plan import Options
from poseidon.engine.reference import Reference
from poseidon.engine.report import report, uncounted
from poseidon.engine.staged import Staged
from poseidon.engine.start import digest
from poseidon.engine.traced import traced

__all__ = [
    "CudaCopies",
    "Device",
    "Downpour",
    "Engine",
    "Exchange",
    "Host",
    "Options",
    "Reference",
    "Staged",
    "digest",
    "join",
    "report",
    "traced",
    "uncounted",
]
