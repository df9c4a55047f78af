"""The information book, the cost model and the choice of scheme. Pure: no sockets, no torch."""

from poseidon.planning.book import Book, FactorSize, KVPair, Param, Unit, build_book
from poseidon.planning.choice import Decision, decide, describe
from poseidon.planning.cost import Scheme, best_scheme

__all__ = [
    "Book",
    "Decision",
    "FactorSize",
    "KVPair",
    "Param",
    "Scheme",
    "Unit",
    "best_scheme",
    "build_book",
    "decide",
    "describe",
]
