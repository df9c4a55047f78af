"""The information book: which parameter travels in which unit, by which scheme, over which shards.

A *unit* is what is sent as soon as all its parameters' gradients are final: one large tensor, or several
small ones merged so that they do not cost a message each. A PS unit is cut into *KV pairs*, each owned by
one server shard. Every rank builds the same book from the same arguments; nothing here opens a socket.

Layout of a merged unit with n parameters: their values one after the other, then n flags, 1 where this
rank has a gradient. Summed like the rest, a flag tells whether *any* rank used the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from poseidon.planning.blocks import Blocks
from poseidon.planning.cost import Scheme
from poseidon.planning.sparse import row_bytes
from poseidon.planning.topology import Topology

#: A merged unit is closed before a layer this many times larger than `merge_bytes`: what is final
#: would otherwise wait for that layer's computation.
CLOSE_FACTOR = 4

#: What a weight's gradient may be made of: factors of a linear layer, or an embedding's touched rows.
Factors = Literal["linear", "rows"]
#: An index has 4 bytes where that is enough.
SMALL_INDEX = 1 << 31


class FactorSize(NamedTuple):
    """Rows K of a layer's factors on one worker node (of an embedding: different rows that were touched), and the bytes
    of one element of them.

    Attributes:
        u, v: share of non-zeros in the gradient of the layer's output, and in its input.
    """

    rows: int
    itemsize: int
    u: float = 1.0
    v: float = 1.0


@dataclass(frozen=True)
class Param:
    """One trainable tensor.

    Attributes:
        factors: of the weight (M x N) of a layer that can travel otherwise than whole: as what.
        counted: an embedding's gradient is divided by how often each row was looked up anywhere
            (scale_grad_by_freq): it has to travel as rows, with their counts.
    """

    name: str
    layer: str
    layer_type: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int  # bytes
    factors: Factors | None = None
    counted: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def row_bytes(self) -> int:
        """One row of an embedding as it travels: with its index, and its count and use."""
        index = 4 if self.shape[0] < SMALL_INDEX else 8
        return self.shape[1] * self.itemsize + index + (8 if self.counted else 0)


@dataclass(frozen=True)
class KVPair:
    """A slice of a unit's flattened values, in elements, and the rank whose shard owns it."""

    index: int
    offset: int
    length: int
    server: int


@dataclass(frozen=True)
class Unit:
    """What travels together. `params` index the book's parameters; `merged` units carry flags."""

    index: int
    params: tuple[int, ...]
    scheme: Scheme
    merged: bool
    numel: int  # elements, flags included
    itemsize: int  # bytes
    pairs: tuple[KVPair, ...] = ()
    shape: tuple[int, ...] = ()  # of what goes otherwise than by PS

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class Sent(NamedTuple):
    """Payload bytes that a rank sends in an iteration: to other nodes, and to the other devices of its own."""

    between: float = 0.0
    inside: float = 0.0

    def plus(self, other: Sent) -> Sent:
        return Sent(self.between + other.between, self.inside + other.inside)


@dataclass(frozen=True)
class Book:
    params: tuple[Param, ...]
    units: tuple[Unit, ...]
    topology: Topology
    unit_of: tuple[int, ...]  # parameter index -> unit index

    def priority(self, round_: int, unit: int, *, front: bool) -> int:
        """Lower leaves first: the oldest round, for which others still wait. Above 0, which is for what is no unit's.

        Args:
            front: within a round what the next forward needs first. Else as it comes: where all of a round is waited
                for, the small front layers' pushes last leave the shortest tail.
        """
        return 1 + round_ * len(self.params) + (min(self.units[unit].params) if front else 0)

    def planned_bytes(self, rank: int, factors: Mapping[str, FactorSize], coded: Collection[str] = ()) -> Sent:
        """What `rank` sends, if each node sees the rows that `factors` tells, by name of the weight that does not go
        by PS, divided evenly over its devices.

        Args:
            coded: weights whose factors are to be counted as they are then; by default none: before they are coded.
        """
        total = Sent()
        for unit in self.units:
            total = total.plus(self.unit_bytes(unit, rank, factors, coded))
        return total

    def unit_bytes(self, unit: Unit, rank: int, factors: Mapping[str, FactorSize], coded: Collection[str] = ()) -> Sent:
        if unit.scheme == "ps":
            return self._by_ps(unit, rank)
        param = self.params[unit.params[0]]
        size, its = factors[param.name], param.name in coded
        workers, nodes = len(self.topology.workers), len(self.topology.nodes)
        k = size.rows * nodes / workers  # of a device
        row = param.row_bytes if unit.scheme == "rows" else row_bytes(size, *param.shape, coded=its)
        own = k * row if self.topology.works(rank) else 0.0
        if unit.scheme == "adam":
            return self._by_adam(unit, rank, own)
        if unit.scheme == "block":
            return self._by_block(unit, rank, lambda shape: k * row_bytes(size, *shape, coded=its))
        if not self.topology.works(rank):
            return Sent()
        beside, elsewhere = self.topology.beside(rank), nodes - 1
        senders = [other for other in self.topology.workers if other not in (rank, *beside)]
        passed_on = sum(self.speaks_for(unit, other, rank) for other in senders)
        blocks = 0
        if unit.scheme == "sfb" and self.topology.divides:
            blocks = len(self.topology.part(rank, param.shape[0])) * param.shape[1] * param.itemsize
        return Sent(elsewhere * own, len(beside) * (own + passed_on * own + blocks))

    def speaks_for(self, unit: Unit, sender: int, rank: int) -> bool:
        """Does `rank` hand on what `sender`, of another node, sends to its node?"""
        node = self.topology.node_of(rank)
        key = self.topology.device_of(sender) if self.topology.works(sender) else unit.index
        return node is not None and self.topology.delegate(node, sender, key) == rank

    def _by_ps(self, unit: Unit, rank: int) -> Sent:
        topology, beside = self.topology, len(self.topology.beside(rank))
        node = topology.node_of(rank)
        between = inside = 0
        for pair in unit.pairs:
            delegate = None if node is None else topology.delegate(node, pair.server, unit.index + pair.index)
            if pair.server == rank:
                between += pair.length * (len(topology.nodes) - (node is not None))
                inside += pair.length * beside
            elif delegate == rank:
                between += pair.length
                inside += pair.length * beside
            elif node is not None:
                inside += pair.length
        return Sent(between * unit.itemsize, inside * unit.itemsize)

    def _by_adam(self, unit: Unit, rank: int, own: float) -> Sent:
        topology, owner = self.topology, unit.pairs[0].server
        beside, node = len(topology.beside(rank)), topology.node_of(rank)
        if owner == rank:
            return Sent((len(topology.nodes) - (node is not None)) * unit.nbytes, beside * unit.nbytes)
        if node == topology.node_of(owner):
            return Sent(0.0, own)
        return Sent(own, beside * unit.nbytes if self.speaks_for(unit, owner, rank) else 0.0)

    def _by_block(self, unit: Unit, rank: int, row: Callable[[tuple[int, int]], float]) -> Sent:
        """`row`: bytes of a device's factors for a part of the gradient of that shape."""
        topology, blocks = self.topology, Blocks(unit.shape, self.topology)
        node, beside, home = topology.node_of(rank), topology.beside(rank), blocks.home(rank)
        block = {owner: blocks.numel(cut) * unit.itemsize for owner, cut in blocks.owned.items()}
        between = float(block.get(rank, 0) * (len(topology.nodes) - (node is not None)))
        inside = float(block.get(rank, 0) * len(beside))
        if node is None:
            return Sent(between)
        for peers, stretch in blocks.ways(rank, topology.device_of(rank)):
            factors = row(blocks.shape(stretch)) * len(peers)
            if peers[0] in beside:
                inside += factors
            else:
                between += factors
        inside += sum(nbytes for owner, nbytes in block.items() if self._passes_on(unit, owner, rank)) * len(beside)
        passed_on = sum(self._passes_on(unit, other, rank) for other in topology.workers)
        near = sum(owner in beside for owner in home.owners)
        return Sent(between, inside + passed_on * near * row(blocks.shape(home.stretch)))

    def _passes_on(self, unit: Unit, sender: int, rank: int) -> bool:
        """Does `rank` hand on what `sender` sends, to the other devices of its node?"""
        return self.topology.node_of(sender) != self.topology.node_of(rank) and self.speaks_for(unit, sender, rank)


def build_book(
    params: Sequence[Param],
    topology: Topology,
    *,
    kv_bytes: int,
    merge_bytes: int,
    schemes: Mapping[str, Scheme] | None = None,
) -> Book:
    """Lay out all parameters, last layer first (the order in which backpropagation finishes them).

    Args:
        schemes: by parameter name; what is missing goes by PS.
    """
    chosen = schemes or {}
    groups = _group(params, merge_bytes, chosen)
    load = dict.fromkeys(topology.servers, 0)
    units = []
    unit_of = [0] * len(params)
    for index, members in enumerate(groups):
        first = params[members[0]]
        scheme: Scheme = chosen.get(first.name, "ps") if len(members) == 1 else "ps"
        merged = len(members) > 1
        numel = sum(params[i].numel for i in members) + (len(members) if merged else 0)
        pairs: tuple[KVPair, ...] = ()
        if scheme == "ps":
            pairs = _cut(numel, first.itemsize, load, kv_bytes, merge_bytes)
        elif scheme == "adam":
            pairs = (_whole(numel, first.itemsize, load),)
        elif scheme == "block":
            pairs = _blocks(first, topology, load)
        shape = first.shape if scheme != "ps" else ()
        units.append(Unit(index, tuple(members), scheme, merged, numel, first.itemsize, pairs, shape))
        for i in members:
            unit_of[i] = index
    return Book(tuple(params), tuple(units), topology, tuple(unit_of))


def _group(params: Sequence[Param], merge_bytes: int, schemes: Mapping[str, Scheme]) -> list[list[int]]:
    """Parameter indices per unit; a unit holds one dtype."""
    groups: list[list[int]] = []
    open_units: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}

    def close(dtype: str) -> None:
        groups.append(open_units.pop(dtype))
        sizes.pop(dtype)

    layer_bytes: dict[str, int] = {}
    for param in params:
        layer_bytes[param.layer] = layer_bytes.get(param.layer, 0) + param.nbytes
    last_layer = None
    for i in reversed(range(len(params))):
        param = params[i]
        if param.layer != last_layer and layer_bytes[param.layer] >= CLOSE_FACTOR * merge_bytes:
            for dtype in list(open_units):
                close(dtype)
        last_layer = param.layer
        if param.nbytes >= merge_bytes or schemes.get(param.name, "ps") != "ps":
            groups.append([i])
            continue
        open_units.setdefault(param.dtype, []).append(i)
        sizes[param.dtype] = sizes.get(param.dtype, 0) + param.nbytes
        if sizes[param.dtype] >= merge_bytes:
            close(param.dtype)
    for dtype in list(open_units):
        close(dtype)
    return groups


def _whole(numel: int, itemsize: int, load: dict[int, int]) -> KVPair:
    """Of a tensor that has one owner: the least loaded shard; `load` is updated."""
    server = min(load, key=lambda rank: (load[rank], rank))
    load[server] += numel * itemsize
    return KVPair(0, 0, numel, server)


def _blocks(param: Param, topology: Topology, load: dict[int, int]) -> tuple[KVPair, ...]:
    """A pair per block; offsets are those of the blocks one after the other. `load` is updated."""
    blocks = Blocks(param.shape, topology)
    pairs = []
    for index, (owner, stretch) in enumerate(blocks.owned.items()):
        load[owner] += blocks.numel(stretch) * param.itemsize
        pairs.append(KVPair(index, stretch.start * blocks.short, blocks.numel(stretch), owner))
    return tuple(pairs)


def _cut(numel: int, itemsize: int, load: dict[int, int], kv_bytes: int, merge_bytes: int) -> tuple[KVPair, ...]:
    """KV pairs of at most `kv_bytes`, dealt round-robin over the shards, least loaded first; `load` is updated.

    A tensor that gives fewer pairs than there are shards is cut finer, so that no shard is idle while
    another is full, but not below `merge_bytes`, where the message costs more than its bytes.
    """
    shards = len(load)
    pieces = math.ceil(numel / max(1, kv_bytes // itemsize))
    finest = numel * itemsize // max(1, merge_bytes)
    pieces = max(1, pieces, min(shards, finest))
    if pieces > shards:
        pieces = math.ceil(pieces / shards) * shards
    pieces = max(1, min(pieces, numel))
    base, extra = divmod(numel, pieces)
    order = sorted(load, key=lambda rank: (load[rank], rank))
    pairs = []
    offset = 0
    for index in range(pieces):
        length = base + (index < extra)
        server = order[index % shards]
        load[server] += length * itemsize
        pairs.append(KVPair(index, offset, length, server))
        offset += length
    return tuple(pairs)
