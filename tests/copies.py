"""In place of CUDA's copies: a device whose memory is the host's, but apart, and whose copies come late."""

from __future__ import annotations

import threading
import time

import torch

from poseidon.engine.staged import Line, Transfer

LIMIT_SECONDS = 60.0


class LateCopies:
    """Implements :class:`poseidon.engine.staged.Copies` by one thread each way, which begins a transfer `delay` seconds
    after it could. So what is changed too early is copied as changed, and what is read too early is not there: NaN,
    or indices that do not exist.

    Attributes:
        transfers: made so far, each way.
    """

    where = torch.device("cpu")

    def __init__(self, delay: float = 0.0005) -> None:
        self._delay = delay
        self._errors: list[Exception] = []
        self._lines = [Line(f"late-copies-{way}", self._errors.append) for way in ("down", "up")]
        self.transfers = [0, 0]

    def down(self) -> Transfer:
        self.transfers[0] += 1
        return _Late(self._lines[0], self._delay)

    def up(self) -> Transfer:
        self.transfers[1] += 1
        return _Late(self._lines[1], self._delay)

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for error in self._errors:
            raise error


class _Late:
    def __init__(self, line: Line, delay: float) -> None:
        self._line, self._delay = line, delay
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = threading.Event()

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy.fill_(float("nan") if copy.is_floating_point() or copy.is_complex() else -(1 << 30))
        self._pairs.append((copy, tensor))
        return copy

    def end(self) -> None:
        self._line.put(self._copy)

    def _copy(self) -> None:
        time.sleep(self._delay)
        with torch.no_grad():
            for copy, tensor in self._pairs:
                copy.copy_(tensor)
        self._pairs.clear()
        self._made.set()

    def finish(self) -> None:
        assert self._made.wait(LIMIT_SECONDS)

    follow = finish  # on a CPU, what computes next is the thread itself


class NoCopies:
    """On the meta device, where there are shapes only: what would look at a value raises, and so does what takes the
    host's tensors together with the device's."""

    where = torch.device("meta")

    def down(self) -> Transfer:
        return _Shapes(torch.device("cpu"))

    def up(self) -> Transfer:
        return _Shapes(self.where)

    def close(self) -> None:
        pass


class _Shapes:
    def __init__(self, to: torch.device) -> None:
        self._to = to

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device != self._to
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._to)

    def end(self) -> None:
        pass

    finish = follow = end
