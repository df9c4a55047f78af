"""The weighted average of P contributions, summed in rank order whatever the order of arrival.

Global gradient = sum over ranks of (n_r / N) g_r. As long as all ranks have the same n_r the weights cancel
and only the final 1/P is multiplied in; the first different n_r switches to weights n_r and a final 1/N.
Which of the two happens depends on the n_r in rank order alone, so the bits are the same on every rerun.
A rank with n_r = 0 contributes nothing, whatever it sends: its gradient may be the mean over no row, NaN.
"""

from __future__ import annotations

import torch

_MISSING = object()


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions are summed in fp32 and rounded once."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Average:
    """Accumulates one slice, round after round.

    Two result buffers alternate: a peer may still be receiving round t from the one when round t + 1 is
    summed into the other; it cannot contribute to round t + 2 before it has all of round t + 1.
    """

    def __init__(self, length: int, world_size: int, dtype: torch.dtype) -> None:
        self._world_size = world_size
        self._dtype = dtype
        self._buffers = [torch.empty(length, dtype=accumulator_dtype(dtype)) for _ in range(2)]
        self._turn = 0
        self._reset()

    def _reset(self) -> None:
        self._got: list[object] = [_MISSING] * self._world_size
        self._next = 0
        self._rows: list[int] = []
        self._equal = True
        self._held: tuple[torch.Tensor, float] | None = None
        self._filled = False

    def missing(self) -> list[int]:
        return [rank for rank, got in enumerate(self._got) if got is _MISSING]

    def offer(self, rank: int, rows: int, data: torch.Tensor | None) -> bool:
        """Take a contribution; its memory must stay as it is until the sum is complete. True: complete."""
        if self._got[rank] is not _MISSING:
            raise RuntimeError(f"rank {rank} contributed twice to one round")
        self._got[rank] = (rows, data)
        while self._next < self._world_size and self._got[self._next] is not _MISSING:
            self._fold(*self._got[self._next])  # type: ignore[misc]
            self._got[self._next] = None
            self._next += 1
        return self._next == self._world_size

    def _fold(self, rows: int, data: torch.Tensor | None) -> None:
        self._rows.append(rows)
        first = self._rows[0]
        if self._equal and rows != first:
            self._equal = False
            if self._filled:
                self._buffers[self._turn].mul_(first)
            elif self._held is not None:
                self._held = (self._held[0], first)
        weight = 1 if self._equal else rows
        if data is None or rows == 0:
            return
        out = self._buffers[self._turn]
        data = data.to(out.dtype)
        if self._filled:
            out.add_(data, alpha=weight)
        elif self._held is None:
            self._held = (data, weight)
        else:
            held, held_weight = self._held
            if held_weight == weight == 1:
                torch.add(held, data, out=out)
            else:
                torch.mul(held, held_weight, out=out).add_(data, alpha=weight)
            self._held, self._filled = None, True

    def take(self) -> torch.Tensor | None:
        """The average, valid until the round after next is complete; None if no rank had a gradient."""
        out = self._buffers[self._turn]
        scale = 1 / (self._world_size if self._equal else sum(self._rows))
        result: torch.Tensor | None = out
        if self._filled:
            out.mul_(scale)
        elif self._held is not None:
            torch.mul(self._held[0], self._held[1] * scale, out=out)
        else:
            result = None
        self._turn ^= 1
        self._reset()
        return result if result is None else result.to(self._dtype)
