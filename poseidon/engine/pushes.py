"""Gradients on their way to the servers of comm=downpour, and weights on their way back: one plan at work."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Container, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from poseidon.engine.device import Device
from poseidon.engine.exchange import Exchange
from poseidon.engine.slices import Segment, Settings, Slices, segments
from poseidon.planning import Book, KVPair, Unit
from poseidon.schemes import from_bytes, in_order, raw, storage_order
from poseidon.transport import Header, Kind

#: Pushes of a unit that may be unanswered.
UNANSWERED = 2
#: The only plan.
PLAN = 0


class _Push:
    """One unit on its way: to its servers, and their answers back. Belongs to the endpoint's thread until it is done.

    Attributes:
        number: of the unit's pushes.
        missing: servers by pair, as long as they have not answered.
        values: answers by pair.
    """

    def __init__(self, unit: Unit, number: int, pairs: Sequence[KVPair]) -> None:
        self.unit, self.number = unit, number
        self.missing = {pair.index: pair.server for pair in pairs}
        self.values: dict[int, torch.Tensor] = {}


class Pushes:
    """Receiver of one model, on a rank that works, and perhaps serves.

    Args:
        params: that the book describes.
        slices: what this rank serves.

    Attributes:
        parts: by unit its pairs, each with what lies in it; every worker begins with another shard.
        stall_seconds: that the training thread has waited for a unit's turn.
    """

    def __init__(
        self,
        exchange: Exchange,
        index: int,
        device: Device,
        book: Book,
        params: Sequence[nn.Parameter],
        slices: Slices,
    ) -> None:
        self._exchange, self._index, self._rank = exchange, index, exchange.rank
        self._device, self._book, self._params, self._slices = device, book, params, slices
        self.stall_seconds = 0.0
        self.parts: list[list[tuple[KVPair, list[Segment]]]] = []
        for unit in book.units:
            start = (self._rank + 1) % len(unit.pairs)
            parts = [(pair, segments(book, unit, pair)) for pair in unit.pairs[start:] + unit.pairs[:start]]
            self.parts.append([(pair, its) for pair, its in parts if its])
        self._staging: dict[tuple[int, int], torch.Tensor] = {}  # by unit and turn
        self._numbers = [0] * len(book.units)  # pushes so far
        self._under_way: list[deque[_Push]] = [deque() for _ in book.units]
        self._open: dict[tuple[int, int], _Push] = {}  # by unit and number
        self._done: SimpleQueue[Any] = SimpleQueue()
        exchange.watch(self._done)
        exchange.open(index, PLAN, self)

    # --- training thread ---------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> None:
        """What this rank pushes from now on is applied with these settings: the servers have them before."""
        text = json.dumps(settings)
        header = Header(Kind.SETTINGS, self._rank, self._index, PLAN)

        def call() -> None:
            self._slices.configure(self._rank, text)
            for server in self._exchange.topology.servers:
                if server != self._rank:
                    self._exchange.endpoint.send(server, header, text.encode())

        self._exchange.endpoint.post(partial(self._exchange.guarded, call, "cannot send settings"))

    @torch.no_grad()
    def push(self, unit: Unit, there: Container[int]) -> None:
        """Send the gradients of those of a unit's parameters that are `there`; waits only for the unit's own pushes."""
        under_way, number = self._under_way[unit.index], self._numbers[unit.index]
        if len(under_way) == UNANSWERED:
            start = time.perf_counter()
            while len(under_way) == UNANSWERED:
                self._take([unit])
            self.stall_seconds += time.perf_counter() - start
        self._numbers[unit.index] += 1
        staging = self._staged(unit, number % UNANSWERED, there)
        parts = [(pair, its) for pair, its in self.parts[unit.index] if any(s.param in there for s in its)]
        push = _Push(unit, number, [pair for pair, _ in parts])
        if not parts:  # parameters without elements
            return
        under_way.append(push)

        def call() -> None:
            self._open[unit.index, number] = push
            for pair, its in parts:
                self._send(push, pair, staging[pair.offset : pair.offset + pair.length], its, there)

        guarded = partial(self._exchange.guarded, call, f"cannot push unit {unit.index}")
        nbytes = sum(pair.length for pair, _ in parts) * unit.itemsize
        self._device.to_host(None, nbytes, lambda _: self._exchange.endpoint.post(guarded))

    def _staged(self, unit: Unit, turn: int, there: Container[int]) -> torch.Tensor:
        """The unit's gradients, in memory that nobody reads any more: the push before last has been answered."""
        staging = self._staging.get((unit.index, turn))
        if staging is None:
            dtype = self._params[unit.params[0]].dtype
            staging = self._staging[unit.index, turn] = torch.zeros(unit.numel, dtype=dtype)
        first = 0
        for index in unit.params if self._device.has_values else ():
            p = self._params[index]
            if index in there and p.grad is not None:
                staging[first : first + p.numel()].copy_(in_order(p.grad, p))
            first += p.numel()
        return staging

    def fresh(self) -> None:
        """Take the weights that have come by now."""
        while not self._done.empty():
            push = self._done.get()
            if push is not None:
                self._write(push)

    def drain(self) -> None:
        """Wait for all answers."""
        while any(self._under_way):
            self._take(self._book.units)

    def _take(self, units: Sequence[Unit]) -> None:
        self._write(self._exchange.take(self._done, partial(self._waits_for, units)))

    @torch.no_grad()
    def _write(self, push: _Push) -> None:
        self._under_way[push.unit.index].popleft()
        for pair, its in self.parts[push.unit.index]:
            if pair.index in push.values and self._device.has_values:
                self.write(its, push.values[pair.index])

    def write(self, its: Sequence[Segment], values: torch.Tensor) -> None:
        """A pair's values to the parameters in it."""
        for s in its:
            p, new = self._params[s.param], values[s.start : s.start + s.length]
            flat = storage_order(p.detach())
            if flat is not None:
                flat[s.offset : s.offset + s.length].copy_(new)
            else:  # memory with holes
                flat = in_order(p, p).clone()
                flat[s.offset : s.offset + s.length].copy_(new)
                p.copy_(flat.view(p.shape))

    def _waits_for(self, units: Sequence[Unit]) -> list[tuple[str, int]]:
        found = []
        for unit in units:
            layer = self._book.params[unit.params[0]].layer or "(root)"
            for push in list(self._under_way[unit.index])[:1]:
                what = f"answer to push {push.number} of layer {layer}"
                found += [(what, server) for server in list(push.missing.values())]
        return found

    def close(self) -> None:
        self._exchange.unwatch(self._done)
        self._exchange.shut(self._index, PLAN)

    # --- endpoint's thread -------------------------------------------------------------------------------------

    def _send(
        self, push: _Push, pair: KVPair, data: torch.Tensor, its: Sequence[Segment], there: Container[int]
    ) -> None:
        """All of a pair; of a merged unit's parameters that have gradients, if not all do: theirs, then which."""
        flags = None
        if any(s.param not in there for s in its):
            flags = bytes(s.param in there for s in its)
            data = torch.cat([data[s.start : s.start + s.length] for s in its if s.param in there])
        header = Header(Kind.PUSH, self._rank, self._index, PLAN, push.number, push.unit.index, pair.index)
        if pair.server == self._rank:
            self._serve(header, data, flags)
        elif flags is None:
            self._exchange.send(pair.server, header, raw(data))
        else:
            self._exchange.send(pair.server, header._replace(k=len(flags)), bytes(raw(data)) + flags)

    def on_message(self, header: Header, payload: memoryview) -> None:
        dtype = self._params[self._book.units[header.unit].params[0]].dtype
        match header.kind:
            case Kind.SETTINGS:
                self._slices.configure(header.rank, str(payload, "utf-8"))
            case Kind.PUSH if header.k:
                self._serve(header, from_bytes(payload[: -header.k], dtype), bytes(payload[-header.k :]))
            case Kind.PUSH:
                self._serve(header, from_bytes(payload, dtype), None)
            case Kind.PULL:
                self._answered(header, from_bytes(payload, dtype))
            case _:
                raise RuntimeError(f"{header.kind.name} for unit {header.unit}, which goes by downpour")

    def on_through(self, rank: int) -> None:
        """Of other models: here session.join() is refused."""

    def _serve(self, header: Header, data: torch.Tensor, flags: bytes | None) -> None:
        def apply() -> None:
            values = self._slices.push(header.rank, header, data, flags)
            if header.rank == self._rank:
                self._answered(header, values)
            else:
                answer = header._replace(kind=Kind.PULL, rank=self._rank, k=0, offset=0, total=0)
                self._exchange.send(header.rank, answer, raw(values))

        guarded = partial(self._exchange.guarded, apply, f"cannot step unit {header.unit}")
        self._device.summed(data.nbytes, guarded, self._exchange.endpoint.post)

    def _answered(self, header: Header, values: torch.Tensor) -> None:
        push = self._open[header.unit, header.round]
        push.values[header.pair] = values
        del push.missing[header.pair]
        if not push.missing:
            del self._open[header.unit, header.round]
            foreign = {pair.index for pair in push.unit.pairs if pair.server != self._rank}
            nbytes = sum(its.nbytes for index, its in push.values.items() if index in foreign)
            self._device.to_device(None, nbytes, lambda _: self._done.put(push))
