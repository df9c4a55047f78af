"""This project's own schemes, PS, factors and blocks, as the engine runs them: unit by unit of the planner's book."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from math import ceil

from poseidon.planning import Book, FactorSize, Unit
from poseidon.planning.events import Priority, Then, Together
from poseidon.planning.sparse import row_bytes
from poseidon.simulation.job import Job, Overlap
from poseidon.simulation.loop import Loop, after_backward, before_forward
from poseidon.simulation.node import Node

Send = Callable[[float, Then, Priority], None]


class EngineSync:
    """Units leave when all their gradients are final; one step for all when all have come, or, with ``full``, one per
    unit as soon as it has."""

    def __init__(
        self,
        node: Node,
        loop: Loop,
        job: Job,
        book: Book,
        factors: dict[str, FactorSize],
        overlap: Overlap,
        piece_bytes: int,
        coded: Collection[str] = (),
    ) -> None:
        self._node, self._loop, self._job, self._book = node, loop, job, book
        self._factors, self._overlap, self._piece = factors, overlap, piece_bytes
        self._coded = coded
        self._nodes = len(book.topology.nodes)
        number = {param.name: index for index, param in enumerate(book.params)}
        self._unit = {name: book.unit_of[index] for name, index in number.items()}
        needed = [{self._unit[name] for name in layer.params} for layer in job.layers]
        self._layers = [[i for i, units in enumerate(needed) if unit.index in units] for unit in book.units]
        self._needs = [len(units) for units in needed]
        self._products = {name: layer.product for layer in job.layers for name in layer.params if layer.product}
        self._whole = sum(unit.numel for unit in book.units)
        self._missing: dict[tuple[int, int], int] = {}  # by iteration and unit, gradients
        self._ready: dict[int, list[Unit]] = defaultdict(list)
        self._lacks: dict[tuple[int, int], int] = {}  # by iteration and layer, units (full)
        self._all: dict[int, Together] = {}

    def begin(self, t: int) -> None:
        self._all[t] = Together(len(self._book.units) + 1, partial(self._step, t))
        if t == 0:
            self._loop.open_all(0)

    def final(self, t: int, params: list[str]) -> None:
        for name in params:
            unit = self._book.units[self._unit[name]]
            key = (t, unit.index)
            self._missing[key] = self._missing.get(key, len(unit.params)) - 1
            if self._missing[key]:
                continue
            del self._missing[key]
            if self._overlap == "none":
                self._ready[t].append(unit)
            else:
                self._send(t, unit)

    def over(self, t: int) -> None:
        for unit in self._ready.pop(t, ()):
            self._send(t, unit)
        self._all[t]()

    def _send(self, t: int, unit: Unit) -> None:
        # Without full overlap it is first come, first served.
        priority = (t, min(self._layers[unit.index])) if self._overlap == "full" else ()
        done = partial(self._apply, t, unit)
        if unit.scheme == "ps":
            self._node.to_host(unit.nbytes, partial(self._push, unit, priority, done))
        elif unit.scheme == "block":
            self._node.to_host(self._own_bytes(unit), partial(self._raise_block, unit, priority, done))
        else:
            own = self._own_bytes(unit)
            self._node.to_host(own, partial(self._broadcast, unit, own, priority, done))

    def _push(self, unit: Unit, priority: Priority, done: Then) -> None:
        """Every piece to its shard, where it waits for the others' and is added up, and back.

        Pieces are dealt evenly to the shards, so that of each a share of (P-1)/P leaves the node; what comes in
        meanwhile, and is to be added up here, is as much.
        """
        node = self._node
        piece = unit.nbytes / len(unit.pairs)
        away = piece * (self._nodes - 1) / self._nodes
        together = Together(len(unit.pairs), partial(node.to_device, unit.nbytes, done))

        def sum_and_return(summed: Together) -> None:
            node.add_up(away, summed)

        for _ in unit.pairs:
            summed = Together(2, partial(node.transfer, away, together, priority))
            node.add_up(piece - away, summed)
            node.transfer(away, partial(sum_and_return, summed), priority)

    def _raise_block(self, unit: Unit, priority: Priority, done: Then) -> None:
        """Factors to the owners of blocks, whose hosts multiply them; a worker's take as long as adding up the block
        would. A block leaves when all factors for it are in."""
        node, others = self._node, self._nodes - 1
        name, (m, n) = self._book.params[unit.params[0]].name, unit.shape
        size, part = self._factors[name], (m / self._nodes, n) if m >= n else (m, n / self._nodes)
        up = others * size.rows * row_bytes(size, *part, coded=name in self._coded)
        away = unit.nbytes * others / self._nodes
        arrived = partial(node.to_device, unit.nbytes, done)
        multiplied = Together(2, lambda: self._in_pieces(away, priority, node.transfer, arrived))
        node.add_up(unit.nbytes / self._nodes, multiplied)

        def send_and_multiply(nbytes: float, then: Then, priority: Priority) -> None:
            node.transfer(nbytes, partial(node.add_up, away * nbytes / up, then), priority)

        self._in_pieces(up, priority, send_and_multiply, multiplied)

    def _own_bytes(self, unit: Unit) -> float:
        """Of this node's factors, or touched rows."""
        param = self._book.params[unit.params[0]]
        size = self._factors[param.name]
        return size.rows * (param.row_bytes if unit.scheme == "rows" else sum(param.shape) * size.itemsize)

    def _broadcast(self, unit: Unit, own: float, priority: Priority, done: Then) -> None:
        """On the link coded factors are smaller; to and from the device they are as they were."""
        others, param = self._nodes - 1, self._book.params[unit.params[0]]
        size = self._factors[param.name]
        wire = size.rows * row_bytes(size, *param.shape, coded=True) if param.name in self._coded else own
        back = partial(self._node.to_device, others * own, done)
        self._in_pieces(others * wire, priority, self._node.transfer, back)

    def _in_pieces(self, nbytes: float, priority: Priority, send: Send, then: Then) -> None:
        """To all peers together; of what goes to one, a piece has at most so many bytes."""
        pieces = max(1, ceil(nbytes / max(1, self._nodes - 1) / self._piece))
        together = Together(pieces, then)
        for _ in range(pieces):
            send(nbytes / pieces, together, priority)

    def _apply(self, t: int, unit: Unit) -> None:
        """The unit's parts are on the device."""
        product = self._products.get(self._book.params[unit.params[0]].name, 0.0) if unit.scheme == "sfb" else 0.0
        seconds, priority = self._nodes * product, after_backward(t)
        if self._overlap == "full":
            seconds += self._job.step * unit.numel / self._whole
            priority = before_forward(t + 1, min(self._layers[unit.index]))
        self._node.compute(seconds, partial(self._applied, t, unit), priority)

    def _applied(self, t: int, unit: Unit) -> None:
        if self._overlap == "full":
            for layer in self._layers[unit.index]:
                key = (t, layer)
                self._lacks[key] = self._lacks.get(key, self._needs[layer]) - 1
                if not self._lacks[key]:
                    del self._lacks[key]
                    self._loop.open(t + 1, layer)
        self._all[t]()

    def _step(self, t: int) -> None:
        del self._all[t]
        if self._overlap != "full":
            self._node.compute(self._job.step, partial(self._loop.open_all, t + 1), after_backward(t))
