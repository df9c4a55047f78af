"""What an engine does, recorded: put around its parts where a run is to leave a timeline, and there only.

Wrapped when they are made rather than asked at each message whether somebody looks: without a tracer nothing of this
stands on any path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from poseidon.engine.device import Device, Host, Moved
from poseidon.engine.exchange import Exchange
from poseidon.engine.syncers import Syncers
from poseidon.planning import Book
from poseidon.schemes import Contribution
from poseidon.tracing import About, Row, Tracer
from poseidon.transport import Header, Kind

#: They carry nothing of a layer.
_WORDS = (Kind.BEGIN, Kind.CHANGED)


def about_units(book: Book) -> list[About]:
    """Of each unit: the layer that most of it belongs to, and its scheme."""
    found = []
    for unit in book.units:
        params = [book.params[index] for index in unit.params]
        layers = list(dict.fromkeys(param.layer or "(root)" for param in params))
        name = layers[0] if len(layers) == 1 else f"{layers[0]} ... {layers[-1]} ({len(layers)} layers)"
        largest = max(params, key=lambda param: param.numel)
        found.append(About(name, largest.layer, {"unit": unit.index, "scheme": unit.scheme}))
    return found


def message_id(header: Header, receiver: int) -> str:
    """The same where it is sent and where it comes."""
    parts = (header.rank, header.model, header.plan, header.round, header.unit, header.pair, header.offset)
    return f"{header.kind.name}.{'.'.join(map(str, parts))}>{receiver}"


class TracedSyncers(Syncers):
    """Syncers that record messages, waits and a server's sums."""

    def __init__(
        self, tracer: Tracer, exchange: Exchange, model: int, plan: int, book: Book, *args: Any, **kwargs: Any
    ) -> None:
        self._tracer = tracer  # before messages come
        self._about, self._me, self._adds = about_units(book), exchange.rank, kwargs["device"].has_values
        super().__init__(exchange, model, plan, book, *args, **kwargs)

    def _message(self, row: Row, peer: int, header: Header, nbytes: int, receiver: int, start: float) -> None:
        more = {"bytes": nbytes, "peer": peer, "message": message_id(header, receiver)}
        about = self._about[header.unit]
        kind, round_ = header.kind.name.lower(), header.round
        self._tracer.span(row, about, start, time.monotonic(), **more, content=kind, round=round_)

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind in _WORDS:
            super().on_message(header, payload)
            return
        start = time.monotonic()
        with self._tracer.at(self._about[header.unit]):
            super().on_message(header, payload)
        self._message(Row.receive, header.rank, header, payload.nbytes, self._me, start)

    def _send(self, peer: int, header: Header, payload: Any) -> None:
        start = time.monotonic()
        super()._send(peer, header, payload)
        self._message(Row.send, peer, header, 0 if payload is None else memoryview(payload).nbytes, peer, start)

    def contribute(self, round_: int, step: int, unit: int, contribution: Contribution) -> None:
        with self._tracer.at(self._about[unit]):
            super().contribute(round_, step, unit, contribution)

    def share(self, round_: int, unit: int, rows: range, values: torch.Tensor) -> None:
        with self._tracer.at(self._about[unit]):
            super().share(round_, unit, rows, values)

    def _to_host(self, value: Any, nbytes: int, call: Callable[[Any], None], what: str) -> None:
        super()._to_host(value, nbytes, self._later(call), what)

    def _finished(self, round_: int, unit: int, result: Any) -> None:
        with self._tracer.at(self._about[unit]):
            super()._finished(round_, unit, result)

    def _summed(self, nbytes: int, call: Callable[[], None]) -> None:
        # An emulated host's sums are recorded by its own timeline: what is left here takes no time.
        timed = self._later(partial(self._add, call) if self._adds and nbytes else call)
        super()._summed(nbytes, timed)

    def _add(self, call: Callable[[], None]) -> None:
        start = time.monotonic()
        call()
        self._tracer.span(Row.aggregate, self._tracer.about, start, time.monotonic())

    def _later(self, call: Callable[..., None]) -> Callable[..., None]:
        """`call`, in another thread or after others, is about what this thread is at."""
        about = self._tracer.about

        def told(*args: Any) -> None:
            with self._tracer.at(about):
                call(*args)

        return told

    def take(self) -> tuple[int, int, Any]:
        start = time.monotonic()
        round_, unit, result = super().take()
        self._tracer.span(Row.wait, self._about[unit], start, time.monotonic(), round=round_)
        return round_, unit, result


class TracedDevice:
    """A device whose products, and copies if its memory is its own, are recorded."""

    def __init__(self, inner: Device, tracer: Tracer) -> None:
        self._inner, self._tracer = inner, tracer
        self.has_values, self.where = inner.has_values, inner.where
        self.ready, self.received, self.place = inner.ready, inner.received, inner.place
        self.summed, self.busy = inner.summed, inner.busy
        self._copies = not isinstance(inner, Host)

    def to_host(self, value: Any, nbytes: int, then: Moved) -> None:
        self._inner.to_host(value, nbytes, self._copied(Row.copy_out, nbytes, then))

    def to_device(self, value: Any, nbytes: int, then: Moved) -> None:
        self._inner.to_device(value, nbytes, self._copied(Row.copy_in, nbytes, then))

    def _copied(self, row: Row, nbytes: int, then: Moved) -> Moved:
        """From the request until it is done, which may wait for others."""
        if not self._copies or not self._tracer.recording:
            return then
        about, start = self._tracer.about, time.monotonic()

        def told(moved: Any) -> None:
            self._tracer.span(row, about, start, time.monotonic(), bytes=nbytes)
            then(moved)

        return told

    def reconstruct(
        self,
        name: str,
        contributions: Sequence[Contribution],
        shape: torch.Size,
        dtype: torch.dtype,
        rows: range | None = None,
    ) -> torch.Tensor | None:
        layer = name.rpartition(".")[0]
        about = About(f"reconstruct {layer}", layer, {"pass": "reconstruct"})
        return self._timed(Row.device, about, lambda: self._inner.reconstruct(name, contributions, shape, dtype, rows))

    def multiplied(
        self, contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        return self._timed(
            Row.aggregate, self._tracer.about, lambda: self._inner.multiplied(contributions, shape, dtype)
        )

    def _timed(self, row: Row, about: About, product: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        start = time.monotonic()
        result = product()
        self._tracer.span(row, about, start, time.monotonic())
        return result


def traced(device: Device, tracer: Tracer | None) -> Device:
    """`device`, recorded if somebody looks. An emulated one records itself (``emulation.traced``)."""
    return device if tracer is None or not device.has_values else TracedDevice(device, tracer)
