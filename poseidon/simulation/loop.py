"""The training loop of a node: forward and backward passes on its device, layer by layer, iteration after iteration."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Protocol

from poseidon.planning.events import Priority
from poseidon.simulation.job import Job
from poseidon.simulation.node import Node

# Within an iteration: an update that a layer's forward pass waits for comes before that pass, all forward passes
# before all backward passes, and what is left to do with gradients (a step for all) after them.
_UPDATE, _FORWARD = 0, 1
_PASS, _BACK, _AFTER = 0, 1, 2


def before_forward(iteration: int, layer: int) -> Priority:
    """On the device, of an update that a layer's forward pass waits for."""
    return (iteration, _PASS, layer, _UPDATE)


def after_backward(iteration: int) -> Priority:
    """On the device, of work on gradients."""
    return (iteration, _AFTER, 0, 0)


class Sync(Protocol):
    """How gradients are made global. It opens the gates of the next iteration's layers, ``loop.open(t + 1, layer)``;
    layers without weights have none."""

    def begin(self, t: int) -> None:
        """Iteration `t` may begin: no gate of it is open yet."""

    def final(self, t: int, params: list[str]) -> None:
        """The gradients of some parameters are."""

    def over(self, t: int) -> None:
        """The backward pass is."""


class Loop:
    """Drives one node.

    Args:
        skips: names of weights whose local product is not computed.

    Attributes:
        iterations: that there will be.
        ends: of backward passes, in simulated seconds.
    """

    def __init__(self, node: Node, job: Job, iterations: int, skips: frozenset[str] = frozenset()) -> None:
        self.ends: list[float] = []
        self.iterations = iterations
        self._node, self._job = node, job
        self._backward = [
            layer.backward - (layer.product if skips.intersection(layer.params) else 0.0) for layer in job.layers
        ]
        self._open: dict[int, set[int]] = defaultdict(set)  # layers by iteration
        self._next: dict[int, int] = {}  # by iteration the layer whose forward pass comes next, if its gate is closed
        self._final: list[list[str]] = [[] for _ in job.layers]  # by layer, what is final after its backward pass
        first: dict[str, int] = {}  # layer whose call comes first, and whose backward pass last
        for i, layer in enumerate(job.layers):
            for name in layer.params:
                first.setdefault(name, i)
        for name, i in first.items():
            self._final[i].append(name)

    def run(self, sync: Sync) -> None:
        """Queue the first iteration; the clock does the rest."""
        self._sync = sync
        self._start(0)

    def open(self, t: int, layer: int) -> None:
        """Weights of a layer are ready for iteration `t`."""
        self._open[t].add(layer)
        if self._next.get(t) == layer:
            del self._next[t]
            self._forward(t, layer)

    def open_all(self, t: int) -> None:
        for layer in range(len(self._job.layers)):
            self.open(t, layer)

    def _start(self, t: int) -> None:
        if t < self.iterations:
            self._sync.begin(t)
            self._advance(t, 0)

    def _advance(self, t: int, layer: int) -> None:
        if layer == len(self._job.layers):
            self._back(t, layer - 1)
        elif layer in self._open[t] or not self._job.layers[layer].params:
            self._forward(t, layer)
        else:
            self._next[t] = layer

    def _forward(self, t: int, layer: int) -> None:
        priority = (t, _PASS, layer, _FORWARD)
        self._node.compute(self._job.layers[layer].forward, partial(self._advance, t, layer + 1), priority)

    def _back(self, t: int, layer: int) -> None:
        priority = (t, _BACK, len(self._job.layers) - layer, 0)
        self._node.compute(self._backward[layer], partial(self._backed, t, layer), priority)

    def _backed(self, t: int, layer: int) -> None:
        if self._final[layer]:
            self._sync.final(t, self._final[layer])
        if layer:
            self._back(t, layer - 1)
            return
        self.ends.append(self._node.clock.now)
        self._open.pop(t)
        self._sync.over(t)
        self._start(t + 1)
