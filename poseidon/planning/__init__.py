"""The information book, the cost model and the choice of scheme. Pure: no sockets, no torch."""

from poseidon.planning.book import Book, Factors, FactorSize, KVPair, Param, Sent, Unit, build_book
from poseidon.planning.buffered import Buffered, buffered
from poseidon.planning.choice import FACTORED, Decision, compulsory, decide, describe, schemes_by_layer
from poseidon.planning.cost import Scheme, best_scheme, sharded_bytes
from poseidon.planning.recorded import Recorded, read_plan, recorded_plan
from poseidon.planning.time import Rates, Timing
from poseidon.planning.timeline import Overlap
from poseidon.planning.topology import Topology
from poseidon.planning.totals import LayerRow, by_layer, totals

__all__ = [
    "FACTORED",
    "Book",
    "Buffered",
    "Decision",
    "FactorSize",
    "Factors",
    "KVPair",
    "LayerRow",
    "Overlap",
    "Param",
    "Rates",
    "Recorded",
    "Scheme",
    "Sent",
    "Timing",
    "Topology",
    "Unit",
    "best_scheme",
    "buffered",
    "build_book",
    "by_layer",
    "compulsory",
    "decide",
    "describe",
    "read_plan",
    "recorded_plan",
    "schemes_by_layer",
    "sharded_bytes",
    "totals",
]
