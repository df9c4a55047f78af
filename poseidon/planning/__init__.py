"""The information book, the cost model and the choice of scheme. Pure: no sockets, no torch."""

from poseidon.planning.book import Book, FactorSize, KVPair, Param, Unit, build_book
from poseidon.planning.choice import Decision, decide, describe
from poseidon.planning.cost import Scheme, best_scheme
from poseidon.planning.totals import LayerRow, by_layer, totals

__all__ = [
    "Book",
    "Decision",
    "FactorSize",
    "KVPair",
    "LayerRow",
    "Param",
    "Scheme",
    "Unit",
    "best_scheme",
    "build_book",
    "by_layer",
    "decide",
    "describe",
    "totals",
]
