"""Copies between CUDA memory and the host's: pinned memory, a stream each way, an event after each transfer.

Nothing here makes the training thread or the device wait: a stream waits for events of another one, a thread of its own
for those of the way down.
"""

from __future__ import annotations

import torch

from poseidon.engine.staged import Transfer


class CudaCopies:
    """Implements :class:`poseidon.engine.staged.Copies`.

    Args:
        where: the device, with its number.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._down, self._up = torch.cuda.Stream(where), torch.cuda.Stream(where)

    def down(self) -> Transfer:
        return _Down(self._down)

    def up(self) -> Transfer:
        return _Up(self._up)


class _Transfer:
    """Copies on one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._made = torch.cuda.Event(blocking=True)  # who waits on the host sleeps meanwhile
        self._kept: list[torch.Tensor] = []  # of the device, as long as its allocator does not know of the copies

    def end(self) -> None:
        self._made.record(self._stream)

    def finish(self) -> None:
        self._made.synchronize()
        self._kept.clear()

    def follow(self) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._made)
        for tensor in self._kept:
            tensor.record_stream(current)
        self._kept.clear()


class _Down(_Transfer):
    """Behind what the present stream has been given: in a hook, autograd makes that the one of the gradient."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        stream.wait_stream(torch.cuda.current_stream(stream.device))

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
        self._kept.append(tensor)
        return host


class _Up(_Transfer):
    """Begun in a thread of its own, in which what is not pinned is copied into memory that is."""

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            pinned = tensor
            if not tensor.is_pinned():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._stream.device)
            there.copy_(pinned, non_blocking=True)
        self._kept.append(there)
        return there
