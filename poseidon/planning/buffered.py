"""Memory of gradients that wait to be applied, with staleness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from poseidon.planning.blocks import Blocks
from poseidon.planning.book import Book, FactorSize


class Buffered(NamedTuple):
    """Bytes on one rank, at most.

    Attributes:
        gradients: own ones on their way out, in whose place averages come back.
        factors: and rows, of all ranks.
        shards: sums of the parameters that this rank serves, and what others have pushed early.
    """

    gradients: int
    factors: int
    shards: int


def buffered(book: Book, rank: int, factors: Mapping[str, FactorSize], staleness: int) -> Buffered:
    """What `rank` keeps when it is as far ahead as it may be: s + 1 rounds; 2 + 2s of what is sent from or summed in.

    Args:
        factors: as each node has them, by name of the weight that does not go by PS; others are left out.
    """
    topology = book.topology
    waiting, turns = staleness + 1, 2 + 2 * staleness
    nodes, workers = len(topology.nodes), len(topology.workers)
    gradients = rows = shards = 0.0
    for unit in book.units:
        if unit.scheme in ("ps", "adam", "block"):
            gradients += waiting * unit.nbytes
        if unit.scheme == "ps":
            owned = sum(pair.length for pair in unit.pairs if pair.server == rank) * unit.itemsize
            shards += owned * (turns + (nodes - 1) * waiting)
            continue
        param = book.params[unit.params[0]]
        size = factors.get(param.name, FactorSize(0, 0))
        k, itemsize = size.rows, size.itemsize
        everyone = k * nodes * (param.row_bytes if unit.scheme == "rows" else sum(param.shape) * itemsize)
        rows += turns * everyone / workers
        if unit.scheme == "block":
            blocks = Blocks(unit.shape, topology)
            mine = blocks.owned.get(rank)
            rows += 0 if mine is None else waiting * everyone * sum(blocks.shape(mine)) / max(1, sum(param.shape))
        elif unit.scheme != "adam" or unit.pairs[0].server == rank:
            rows += waiting * everyone
    return Buffered(int(gradients), int(rows), int(shards))
