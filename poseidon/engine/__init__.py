"""The engine: hooks that notice a final gradient, syncers, and the exchange between threads."""

from poseidon.engine.engine import Engine, Options
from poseidon.engine.exchange import Exchange
from poseidon.engine.report import report
from poseidon.engine.start import TAG_TENSORS, agree, broadcast, digest

__all__ = ["TAG_TENSORS", "Engine", "Exchange", "Options", "agree", "broadcast", "digest", "report"]
