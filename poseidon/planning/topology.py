"""Who stands where: ranks on nodes, and the shards' owners. Three levels move gradients: the devices of a node, the
nodes among each other, and the server shards (P15).

Between two nodes one rank of each speaks for a key, its *delegate*: what the devices of a node have is merged there
before it leaves the node, and what comes in is passed on from there. Delegates differ from key to key, so that every
device does its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """Ranks that work, by node, and ranks that own server shards.

    Attributes:
        nodes: of each worker node its ranks, one per device, in ascending order.
        servers: ranks that own shards; those on no node only serve.
        shares: devices of a node may divide products among them.
    """

    nodes: tuple[tuple[int, ...], ...]
    servers: tuple[int, ...]
    shares: bool = True

    @classmethod
    def flat(cls, world_size: int) -> Topology:
        """Every rank a node of its own, and all of them servers."""
        return cls.of([1] * world_size)

    @classmethod
    def of(cls, devices: Sequence[int], servers: int | Sequence[int] | None = None) -> Topology:
        """Nodes with so many devices each; ranks count through the first node, then the next, then the servers.

        Args:
            servers: None: all nodes serve; numbers of the nodes that do; or how many more there are that only serve.
        """
        nodes, first = [], 0
        for count in devices:
            nodes.append(tuple(range(first, first + count)))
            first += count
        if isinstance(servers, int):
            return cls(tuple(nodes), tuple(range(first, first + servers)))
        serving = range(len(nodes)) if servers is None else sorted(set(servers))
        return cls(tuple(nodes), tuple(rank for node in serving for rank in nodes[node]))

    @cached_property
    def workers(self) -> tuple[int, ...]:
        return tuple(rank for node in self.nodes for rank in node)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (node, place) for node, ranks in enumerate(self.nodes) for place, rank in enumerate(ranks)}

    @cached_property
    def parties(self) -> tuple[int, int, bool]:
        """Workers P1 and servers P2 as the cost model counts them, and whether servers do nothing else: nodes; the
        devices of the only one."""
        if len(self.nodes) == 1:
            return len(self.workers), len(self.servers), not any(map(self.works, self.servers))
        homes = {(self.node_of(rank), None if self.works(rank) else rank) for rank in self.servers}
        return len(self.nodes), len(homes), not any(map(self.works, self.servers))

    @cached_property
    def apart(self) -> tuple[int, ...]:
        """The ranks that only serve."""
        return tuple(rank for rank in self.servers if not self.works(rank))

    def works(self, rank: int) -> bool:
        return rank in self._places

    def node_of(self, rank: int) -> int | None:
        """None: it only serves."""
        place = self._places.get(rank)
        return place[0] if place is not None else None

    def device_of(self, rank: int) -> int:
        """A worker's place among the devices of its node."""
        return self._places[rank][1]

    @cached_property
    def divides(self) -> bool:
        """Do the devices of a node divide a product among them? Of nodes that are not alike blocks would differ in
        size, and products of other shapes round differently."""
        return self.shares and len({len(ranks) for ranks in self.nodes}) == 1 and len(self.nodes[0]) > 1

    def part(self, rank: int, rows: int) -> range:
        """A worker's part of work that the devices of its node divide among them."""
        devices, place = len(self.beside(rank)) + 1, self.device_of(rank)
        return range(rows * place // devices, rows * (place + 1) // devices)

    def beside(self, rank: int) -> tuple[int, ...]:
        """The other ranks of its node, beginning with the next one."""
        node = self.node_of(rank)
        if node is None:
            return ()
        ranks, place = self.nodes[node], self.device_of(rank)
        return ranks[place + 1 :] + ranks[:place]

    def delegate(self, node: int, other: int, key: int) -> int:
        """The rank of `node` that speaks with rank `other` about `key`: itself, if it is one of the node."""
        ranks = self.nodes[node]
        return other if other in ranks else ranks[key % len(ranks)]

    def delegates(self, rank: int, key: int) -> list[int]:
        """Those of all nodes but the rank's own. Every rank begins with another node, so that nobody is sent to by all
        at once."""
        mine, count = self.node_of(rank), len(self.nodes)
        start = rank % count if mine is None else mine + 1
        order = [(start + step) % count for step in range(count)]
        return [self.delegate(node, rank, key) for node in order if node != mine]
