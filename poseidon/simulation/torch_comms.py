"""PyTorch's own ways, the references: DDP's buckets round a ring, FSDP2's gathers and reductions; and no way at all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from poseidon.planning import Param, sharded_bytes
from poseidon.planning.events import Together
from poseidon.simulation.job import Job, System
from poseidon.simulation.loop import Loop, after_backward
from poseidon.simulation.node import Node

#: FSDP gathers layers smaller than merge_bytes times this together.
FSDP_MERGES = 16


class NoSync:
    """comm=single: nothing is sent."""

    def __init__(self, node: Node, loop: Loop, job: Job) -> None:
        self._node, self._loop, self._step = node, loop, job.step

    def begin(self, t: int) -> None:
        if t == 0:
            self._loop.open_all(0)

    def final(self, t: int, params: list[str]) -> None:
        pass

    def over(self, t: int) -> None:
        self._node.compute(self._step, partial(self._loop.open_all, t + 1), after_backward(t))


def buckets(params: Sequence[Param], first: int, others: int) -> list[list[Param]]:
    """As DDP fills them, the last parameter first: a bucket is closed by the parameter that makes it this large."""
    result: list[list[Param]] = []
    open_bucket: list[Param] = []
    for param in reversed(params):
        open_bucket.append(param)
        if sum(p.nbytes for p in open_bucket) >= (others if result else first):
            result.append(open_bucket)
            open_bucket = []
    return [*result, open_bucket] if open_bucket else result


class DDPSync:
    """Buckets leave in their order, each when all its gradients are final.

    A ring all-reduce sends 2 (P-1)/P of a bucket in 2 (P-1) steps. What a rank sends in one is cut in two, so that the
    latency of half of the steps hides. Sums go on while the next part is on its way.
    """

    def __init__(self, node: Node, loop: Loop, job: Job, nodes: int, system: System) -> None:
        self._node, self._loop, self._job, self._nodes = node, loop, job, nodes
        self._buckets = buckets(job.params, system.first_bucket_bytes, system.bucket_bytes)
        self._bucket = {param.name: i for i, bucket in enumerate(self._buckets) for param in bucket}

    def begin(self, t: int) -> None:
        if t == 0:
            self._loop.open_all(0)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._all = Together(len(self._buckets) + 1, partial(self._step, t))

    def final(self, t: int, params: list[str]) -> None:
        for name in params:
            self._missing[self._bucket[name]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send(sum(param.nbytes for param in self._buckets[self._next]))
            self._next += 1

    def over(self, t: int) -> None:
        self._all()

    def _send(self, nbytes: int) -> None:
        node, away = self._node, nbytes * (self._nodes - 1) / self._nodes
        done = self._all

        def reduce() -> None:
            both = Together(2, partial(node.to_device, nbytes, done))
            node.transfer(2 * away, both, hops=self._nodes - 1)
            node.add_up(away, both)

        node.to_host(nbytes, reduce)

    def _step(self, t: int) -> None:
        self._node.compute(self._job.step, partial(self._loop.open_all, t + 1), after_backward(t))


class FSDPSync:
    """fully_shard(reshard_after_forward=False): all gathers leave when the iteration begins, in the order in which the
    forward pass waits for them; a group's gradients are scattered when all are final, and added up after they came.
    Every node steps its own rows."""

    def __init__(self, node: Node, loop: Loop, job: Job, nodes: int, merge_bytes: int) -> None:
        self._node, self._loop, self._job, self._nodes = node, loop, job, nodes
        sizes = {param.name: param for param in job.params}
        self._groups: list[list[str]] = []  # of parameters
        self._layers: list[list[int]] = []  # that wait for them
        group_of: dict[str, int] = {}
        room = 0
        for i, layer in enumerate(job.layers):
            new = [name for name in layer.params if name not in group_of]
            nbytes = sum(sizes[name].nbytes for name in new)
            if not self._groups or nbytes > room:
                self._groups.append([])
                self._layers.append([])
                room = FSDP_MERGES * merge_bytes
            room -= nbytes
            self._groups[-1] += new
            group_of |= dict.fromkeys(new, len(self._groups) - 1)
            for group in {group_of[name] for name in layer.params}:
                self._layers[group].append(i)
        self._group_of = group_of
        self._needs = [len({group_of[name] for name in layer.params}) for layer in job.layers]
        away = [sharded_bytes(((sizes[n].shape, sizes[n].itemsize, False) for n in g), nodes) for g in self._groups]
        self._away = [float(nbytes) for nbytes in away]  # leaves a node, each way
        self._own = [sum(sizes[n].nbytes for n in g) / nodes for g in self._groups]

    def begin(self, t: int) -> None:
        self._missing = [len(group) for group in self._groups]
        self._all = Together(len(self._groups) + 1, partial(self._step, t))
        self._lacks = list(self._needs)
        if t == 0:
            self._gather(0)

    def final(self, t: int, params: list[str]) -> None:
        for name in params:
            group = self._group_of[name]
            self._missing[group] -= 1
            if not self._missing[group]:
                self._scatter(group)

    def over(self, t: int) -> None:
        self._all()

    def _gather(self, t: int) -> None:
        node = self._node
        if t == self._loop.iterations:
            return
        for group, away in enumerate(self._away):
            there = partial(node.to_device, away, partial(self._gathered, t, group))
            node.to_host(self._own[group], partial(node.transfer, away, there))

    def _gathered(self, t: int, group: int) -> None:
        for layer in self._layers[group]:
            self._lacks[layer] -= 1
            if not self._lacks[layer]:
                self._loop.open(t, layer)

    def _scatter(self, group: int) -> None:
        node, away, own = self._node, self._away[group], self._own[group]
        summed = partial(node.to_device, own, self._all)
        come = partial(node.add_up, away, summed)
        node.to_host(self._nodes * own, partial(node.transfer, away, come))

    def _step(self, t: int) -> None:
        self._node.compute(self._job.step / self._nodes, partial(self._gather, t + 1), after_backward(t))
