"""The engine: hooks that notice a final gradient, syncers, and the exchange between threads."""

from poseidon.engine.device import Device, Host
from poseidon.engine.downpour import Downpour
from poseidon.engine.engine import Engine, Options
from poseidon.engine.exchange import Exchange
from poseidon.engine.join import join
from poseidon.engine.reference import Reference
from poseidon.engine.report import report, uncounted
from poseidon.engine.start import digest

__all__ = [
    "Device",
    "Downpour",
    "Engine",
    "Exchange",
    "Host",
    "Options",
    "Reference",
    "digest",
    "join",
    "report",
    "uncounted",
]
