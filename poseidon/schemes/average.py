"""The weighted average of P contributions, summed in their order whatever the order of arrival.

Global gradient = sum over ranks of (n_r / N) g_r. As long as all ranks have the same n_r the weights cancel
and only the final 1/P is multiplied in; the first different n_r switches to weights n_r and a final 1/N.
Which of the two happens depends on the n_r in rank order alone, so the bits are the same on every rerun.
A rank with n_r = 0 contributes nothing, whatever it sends: its gradient may be the mean over no row, NaN.

Of nodes with several devices it is done twice: the devices' average weighs as much as they have rows together.

A contribution is added as soon as it is its turn, but the last one: adding that, scaling the sum, and writing it to
where its rank wants it, go block by block, while a block is in the processor's cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

_MISSING = object()
#: Elements of a block.
_BLOCK = 64 * 1024


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
            self._weigh(total, round_, *total.got[total.next])  # type: ignore[misc]
            total.got[total.next] = None
            total.next += 1
        return total.next == self._parts

    def _weigh(self, total: _Sum, round_: int, rows: int, data: torch.Tensor | None) -> None:
        """A contribution's turn has come: it is the last one, until there is another."""
        total.rows.append(rows)
        first = total.rows[0]
        if total.equal and rows != first:
            total.equal = False
            total.weights = [first] * len(total.weights)
            if total.filled:
                self._out(round_).mul_(first)
        if data is None or rows == 0:
            return
        if len(total.held) == 2 or (total.held and total.filled):
            self._fold(total, self._out(round_), total.held, total.weights)
            total.held, total.weights, total.filled = [], [], True
        total.held.append(data)
        total.weights.append(1 if total.equal else rows)

    def _fold(self, total: _Sum, out: torch.Tensor, held: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
        """Add to `out`, or make it, of one contribution or two."""
        parts = [part.to(out.dtype) for part in held]
        if total.filled:
            out.add_(parts[0], alpha=weights[0])
        elif weights[0] == weights[1] == 1:
            torch.add(parts[0], parts[1], out=out)
        else:
            torch.mul(parts[0], weights[0], out=out).add_(parts[1], alpha=weights[1])

    def take(self, round_: int, into: torch.Tensor | None = None) -> tuple[int, torch.Tensor | None]:
        """Rows of all, and the average, which stays until `depth` rounds later; None if no rank had a gradient.

        Args:
            into: where it is written too; may be a contribution's memory.
        """
        total = self._sums.pop(round_)
        rows = sum(total.rows)
        if not total.filled and not total.held:
            return rows, None
        scale = 1 / (self._parts if total.equal else rows)
        out = self._out(round_)
        sources = [part.split(_BLOCK) for part in total.held]
        targets = into.split(_BLOCK) if into is not None else None
        for index, block in enumerate(out.split(_BLOCK)):
            held = [blocks[index] for blocks in sources]
            if len(held) == 1 and not total.filled:
                torch.mul(held[0].to(out.dtype), total.weights[0] * scale, out=block)
            else:
                if held:
                    self._fold(total, block, held, total.weights)
                block.mul_(scale)
            if targets is not None:
                targets[index].copy_(block)
        return rows, out.to(self._dtype)

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
        #: the last contributions, whose turn has come, and which are not in the sum: two, or, if that is filled, one
        self.held: list[torch.Tensor] = []
        self.weights: list[float] = []
        self.filled = False
