"""The weighted average of P contributions, summed in their order whatever the order of arrival.

Global gradient = sum over ranks of (n_r / N) g_r. As long as all ranks have the same n_r the weights cancel
and only the final 1/P is multiplied in; the first different n_r switches to weights n_r and a final 1/N.
Which of the two happens depends on the n_r in rank order alone, so the bits are the same on every rerun.
A rank with n_r = 0 contributes nothing, whatever it sends: its gradient may be the mean over no row, NaN.

Of nodes with several devices it is done twice: the devices' average weighs as much as they have rows together.
"""

from __future__ import annotations

from collections import defaultdict

import torch

_MISSING = object()


def depth_of(staleness: int) -> int:
    """Rounds after which memory that was sent from, or summed in, may be written again (see :class:`Average`)."""
    return 2 + 2 * staleness


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions are summed in fp32 and rounded once."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Average:
    """Accumulates one slice, round after round; several rounds may be under way.

    Results lie in `depth` buffers in turn. With staleness s whoever contributes to round t has all of round t - 1 - s,
    to which then everybody has contributed, having all of round t - 2 - 2s: with depth = 2 + 2s nobody still receives
    what is summed over.
    """

    def __init__(self, length: int, parts: int, dtype: torch.dtype, depth: int) -> None:
        self._length, self._parts, self._dtype, self._depth = length, parts, dtype, depth
        self._buffers: dict[int, torch.Tensor] = {}
        self._sums: dict[int, _Sum] = defaultdict(lambda: _Sum(parts))

    def missing(self, round_: int) -> list[int]:
        got = self._sums[round_].got if round_ in self._sums else []
        return [part for part in range(self._parts) if not got or got[part] is _MISSING]

    def lacking(self) -> set[tuple[int, int]]:
        """(round, part) where other parts have contributed to the round, and this one has not."""
        sums = self._sums.items()
        return {(round_, part) for round_, total in sums for part, got in enumerate(total.got) if got is _MISSING}

    def offer(self, round_: int, part: int, rows: int, data: torch.Tensor | None) -> bool:
        """Take a contribution; its memory must stay as it is until the sum is complete. True: complete."""
        total = self._sums[round_]
        if total.got[part] is not _MISSING:
            raise RuntimeError(f"part {part} contributed twice to one round")
        total.got[part] = (rows, data)
        while total.next < self._parts and total.got[total.next] is not _MISSING:
            self._fold(total, round_, *total.got[total.next])  # type: ignore[misc]
            total.got[total.next] = None
            total.next += 1
        return total.next == self._parts

    def _fold(self, total: _Sum, round_: int, rows: int, data: torch.Tensor | None) -> None:
        total.rows.append(rows)
        first = total.rows[0]
        if total.equal and rows != first:
            total.equal = False
            if total.filled:
                self._out(round_).mul_(first)
            elif total.held is not None:
                total.held = (total.held[0], first)
        weight = 1 if total.equal else rows
        if data is None or rows == 0:
            return
        out = self._out(round_)
        data = data.to(out.dtype)
        if total.filled:
            out.add_(data, alpha=weight)
        elif total.held is None:
            total.held = (data, weight)
        else:
            held, held_weight = total.held
            if held_weight == weight == 1:
                torch.add(held, data, out=out)
            else:
                torch.mul(held, held_weight, out=out).add_(data, alpha=weight)
            total.held, total.filled = None, True

    def take(self, round_: int) -> tuple[int, torch.Tensor | None]:
        """Rows of all, and the average, which stays until `depth` rounds later; None if no rank had a gradient."""
        total = self._sums.pop(round_)
        scale = 1 / (self._parts if total.equal else sum(total.rows))
        out = self._out(round_)
        if total.filled:
            out.mul_(scale)
        elif total.held is not None:
            torch.mul(total.held[0], total.held[1] * scale, out=out)
        else:
            return sum(total.rows), None
        return sum(total.rows), out.to(self._dtype)

    def _out(self, round_: int) -> torch.Tensor:
        turn = round_ % self._depth
        if turn not in self._buffers:
            self._buffers[turn] = torch.empty(self._length, dtype=accumulator_dtype(self._dtype))
        return self._buffers[turn]


class _Sum:
    """One round: what has come, and what is added up."""

    def __init__(self, parts: int) -> None:
        self.got: list[object] = [_MISSING] * parts
        self.next = 0
        self.rows: list[int] = []
        self.equal = True
        self.held: tuple[torch.Tensor, float] | None = None
        self.filled = False
