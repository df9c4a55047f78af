"""A device with memory of its own: gradients leave it, and results come to it, by copies that nobody waits for.

Way down: a contribution is copied to the host behind what its stream has been given to compute; a thread waits for the
copy and hands it on. Neither the training thread nor the device waits. Way up: another thread begins the copy as soon
as a result is complete, perhaps during the backward pass; at the end of the pass the training thread's stream is told
to wait for it, the thread goes on. Of the factors of all ranks only those of others come up: the device has its own.
Weights are multiplied out on the device, except by the owner of Project Adam's scheme, who does so on its host;
embeddings' rows are put together on the host, as everywhere, since that means looking at them.

Bits are the same on all ranks of one kind of device: all do the same operations on the same bytes in the same order.

Host memory is new for every copy and is free again when the last tensor or view of it is gone, a transport's included:
no rule about rounds has to be kept. The alternative, buffers by unit and round like those of factors, has such a rule,
and holds a gradient's memory several times even while nothing is under way; CUDA's allocator of pinned memory keeps
blocks for the next copy in any case. The same goes for the way up, whose results take as much device memory as one
gradient until the backward pass ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from poseidon.engine.device import Host, Moved, Then
from poseidon.schemes import Contribution, Share, Touched

_CLOSE_SECONDS = 5.0


class Transfer(Protocol):
    """Copies that are made one after the other. What they are made from stays as it is until they are."""

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """One more: the copy, which is not there yet."""

    def end(self) -> None:
        """That was the last."""

    def finish(self) -> None:
        """Any thread of the host: wait until they are made."""

    def follow(self) -> None:
        """What the present stream is given from now on comes after them."""


class Copies(Protocol):
    """How memory is copied between a device and its host.

    Attributes:
        where: the device.
    """

    where: torch.device

    def down(self) -> Transfer:
        """Copies on the host of what the present stream makes up to now."""

    def up(self) -> Transfer:
        """Copies on the device of what the host has."""


class _Arrival(NamedTuple):
    """A result that is on the device after `transfer`."""

    value: Any
    transfer: Transfer


class Staged(Host):
    """The host, and before it what copies to and from it take.

    Args:
        failed: told what ends the copies (from any thread); nothing else would wake those who wait for them.
    """

    def __init__(self, copies: Copies, failed: Callable[[Exception], None]) -> None:
        self.where = copies.where
        self._copies = copies
        self._down, self._up = Line("poseidon-to-host", failed), Line("poseidon-to-device", failed)

    def to_host(self, value: Any, nbytes: int, then: Moved) -> None:
        transfer = self._copies.down()
        on_host = _moved(value, transfer.add)
        transfer.end()
        if isinstance(value, Contribution):
            on_host = replace(on_host, origin=value)

        def wait() -> None:
            transfer.finish()
            then(on_host)

        self._down.put(wait)

    def to_device(self, value: Any, nbytes: int, then: Moved) -> None:
        def begin() -> None:
            then(self._begin(value))

        self._up.put(begin)

    def _begin(self, value: Any) -> _Arrival:
        transfer = self._copies.up()
        there = _moved(value, transfer.add)
        transfer.end()
        return _Arrival(there, transfer)

    def received(self, value: Any) -> Any:
        if not isinstance(value, _Arrival):
            return value
        value.transfer.follow()
        return value.value

    def place(self, value: Any) -> Any:
        return self.received(self._begin(value))

    def close(self) -> None:
        """Its threads end."""
        self._down.close()
        self._up.close()


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with all tensors moved; a contribution that has come from the device is there already."""
    match value:
        case torch.Tensor():
            return move(value)
        case Touched():
            counted = {name: _moved(getattr(value, name), move) for name in ("counts", "uses")}
            return replace(value, indices=move(value.indices), values=move(value.values), **counted)
        case Contribution():
            if value.origin is not None:
                return value.origin
            parts = {name: getattr(value, name) for name in ("dense", "factors", "touched")}
            return replace(value, **{name: _moved(part, move) for name, part in parts.items()})
        case Share():
            return replace(value, contributions=_moved(value.contributions, move))
        case list():
            return [_moved(each, move) for each in value]
        case _:
            return value


class Line:
    """Calls made by a thread of their own, one after the other. It begins with the first."""

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._name, self._failed = name, failed
        self._calls: SimpleQueue[Then | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, call: Then) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._calls.put(call)

    def _run(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                call()
            except Exception as error:
                self._failed(error)

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join(_CLOSE_SECONDS)
