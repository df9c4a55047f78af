"""Who owns which block of a weight's gradient, and who gets what for it: scheme ``block``, P15's "factors up, matrix
down", balanced.

The M x N gradient is cut along its longer side into one block per rank that owns a shard. For a block of rows its owner
needs its columns of u (K x M) and all of v (K x N); of columns, the other way round. What the devices of one node own
lies side by side, so that factors for all of it go to that node once.

Alternative: an owner per node, which leaves the other devices' hosts idle, or each rank's factors to every owner apart,
which sends v to a node as often as it has devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from poseidon.planning.topology import Topology


class Home(NamedTuple):
    """Owners of one node, or one that only serves (node: None), and the stretch of the longer side that is theirs."""

    node: int | None
    owners: tuple[int, ...]
    stretch: range


class Blocks:
    """Of one weight.

    Attributes:
        tall: M >= N: blocks are rows; else columns.
        short: the side that is not cut.
        whole: the side that is.
        owned: by owner, its stretch of that; where there are more owners than rows, some have none.
    """

    def __init__(self, shape: Sequence[int], topology: Topology) -> None:
        m, n = shape
        self.tall = m >= n
        self.whole, self.short = range(max(m, n)), min(m, n)
        self._topology = topology
        self.owned = self._cut(sorted(topology.servers, key=self._place))
        self._homes: list[Home] = []
        for owner, stretch in self.owned.items():
            node = topology.node_of(owner)
            if node is not None and self._homes and self._homes[-1].node == node:
                _, owners, before = self._homes[-1]
                self._homes[-1] = Home(node, (*owners, owner), range(before.start, stretch.stop))
            else:
                self._homes.append(Home(node, (owner,), stretch))

    def _place(self, rank: int) -> tuple[int, int]:
        node = self._topology.node_of(rank)
        return len(self._topology.nodes) if node is None else node, rank

    def _cut(self, ranks: list[int]) -> dict[int, range]:
        count, length = len(ranks), len(self.whole)
        cuts = {r: range(length * i // count, length * (i + 1) // count) for i, r in enumerate(ranks)}
        return {rank: cut for rank, cut in cuts.items() if cut} or {ranks[0]: self.whole}

    def shape(self, stretch: range) -> tuple[int, int]:
        """Of the gradient's part."""
        return (len(stretch), self.short) if self.tall else (self.short, len(stretch))

    def numel(self, stretch: range) -> int:
        return math.prod(self.shape(stretch))

    def home(self, rank: int) -> Home:
        """What the node of `rank` owns."""
        node = self._topology.node_of(rank)
        mine = [home for home in self._homes if (rank in home.owners if node is None else home.node == node)]
        return mine[0] if mine else Home(node, (), range(0))

    def ways(self, rank: int, key: int) -> list[tuple[tuple[int, ...], range]]:
        """To whom a worker sends factors, and for which stretch: the other owners of its node, a delegate on every
        other node that owns something, and those that only serve. Every rank begins with another home, so that nobody
        is sent to by all at once.

        Args:
            key: of the delegates.
        """
        node, count = self._topology.node_of(rank), len(self._homes)
        start = (node or 0) + 1
        ways = []
        for home in (self._homes[(start + step) % count] for step in range(count)):
            if home.node is None:
                peers: tuple[int, ...] = home.owners
            elif home.node == node:
                peers = tuple(owner for owner in home.owners if owner != rank)
            else:
                peers = (self._topology.delegate(home.node, rank, key),)
            if peers:
                ways.append((peers, home.stretch))
        return ways
