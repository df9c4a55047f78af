"""The engine: hooks that notice a final gradient, syncers, and the exchange between threads."""

from poseidon.engine.engine import Engine, Options
from poseidon.engine.exchange import Exchange
from poseidon.engine.join import join
from poseidon.engine.report import report
from poseidon.engine.start import digest

__all__ = ["Engine", "Exchange", "Options", "digest", "join", "report"]
