"""Rows: the touched rows of an embedding's gradient go from every worker to every other, who sum them.

Alternative: to the rows' owners and back, as PS does with whole tensors. Per node K rows cost (P-1) K (D+1) floats
here and (P-1)/P (K + U) (D+1) there, U rows being touched by any rank, K <= U <= P K. So broadcast is never worse with
two nodes, and otherwise while ranks see mostly different rows (U >= (P-1) K); it needs one hop instead of two, and no
owner has more to do than another, as the owner of frequent words would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poseidon.schemes.average import accumulator_dtype
from poseidon.schemes.base import Contribution, Touched
from poseidon.schemes.broadcast import Broadcast, Message, as_type, dense_copy, weighted
from poseidon.transport import Header, Kind

#: Bits of the header's `pair`.
_STRIDED, _COUNTED = 1, 2


@dataclass(frozen=True)
class _Part:
    """A stretch of the payload."""

    dtype: torch.dtype
    width: int  # elements per row


class Rows(Broadcast):
    """One embedding's rows. Payload: values [k, D], indices [k], and where counted: counts [k], uses [k]."""

    name, what = "rows", "rows"

    def pack(self, contribution: Contribution) -> Message:
        touched = contribution.touched
        if touched is None:
            dense = dense_copy(contribution)
            return Message(Kind.NONE) if dense is None else Message(Kind.DENSE, dense)
        detail = (_STRIDED if touched.strided else 0) | (_COUNTED if touched.counts is not None else 0)
        columns = (touched.values, touched.indices, touched.counts, touched.uses)
        parts = self._parts(detail)
        data = [c.to(p.dtype).view(-1).view(torch.uint8) for c, p in zip(columns, parts, strict=False) if c is not None]
        return Message(Kind.ROWS, torch.cat(data), detail, touched.indices.numel())

    def size(self, header: Header) -> int:
        if header.kind is Kind.DENSE:
            return self.unit.nbytes
        if header.kind is not Kind.ROWS:
            raise self.not_mine(header)
        if header.pair > _STRIDED | _COUNTED:
            raise RuntimeError(f"rows of unknown form {header.pair} for unit {self.unit.index}")
        return header.k * sum(part.width * part.dtype.itemsize for part in self._parts(header.pair))

    def unpack(self, header: Header, data: torch.Tensor) -> Contribution:
        if header.kind is Kind.DENSE:
            return Contribution(header.rows, dense=as_type(data, self._context.dtype))
        columns, start = [], 0
        for part in self._parts(header.pair):
            end = start + header.k * part.width * part.dtype.itemsize
            columns.append(as_type(data[start:end], part.dtype))
            start = end
        values, indices, *counted = (columns[0], *(column.long() for column in columns[1:]))
        counts, uses = counted or (None, None)
        self._check("index", indices, self.unit.shape[0])
        self._check("count", counts)
        self._check("use", uses)
        values = values.view(header.k, self.unit.shape[1])
        return Contribution(header.rows, touched=Touched(indices, values, counts, uses, bool(header.pair & _STRIDED)))

    def _parts(self, detail: int) -> list[_Part]:
        rows, width = self.unit.shape
        index = _Part(torch.int32 if rows < 1 << 31 else torch.int64, 1)
        counted = [_Part(torch.int32, 1)] * 2 if detail & _COUNTED else []
        return [_Part(self._context.dtype, width), index, *counted]

    def _check(self, what: str, column: torch.Tensor | None, end: int = 1 << 31) -> None:
        if column is None or not column.numel():
            return
        low, high = int(column.min()), int(column.max())
        if low < 0 or high >= end:
            raise RuntimeError(
                f"rows for unit {self.unit.index}: {what} {low if low < 0 else high} is not between 0 and {end - 1}"
            )


def combine(
    contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype
) -> Touched | torch.Tensor | None:
    """The averaged V x D gradient from all ranks' contributions, summed in rank order.

    Returns:
        Its rows, distinct and in ascending order; the whole of it where a rank has sent that; None if no rank has one.
    """
    counted = weighted(contributions)
    parts = [(c.touched, w) for w, c in counted if c.touched is not None]
    dense = [(c.dense, w) for w, c in counted if c.dense is not None]
    if not parts and not dense:
        return None
    wide = accumulator_dtype(dtype)
    scaled = [_weighted(part, weight, wide) for part, weight in parts]
    touched = merge(scaled, divide=True) if scaled else None
    if not dense:
        assert touched is not None
        return Touched(touched.indices, touched.values.to(dtype), strided=touched.strided)
    result = torch.zeros(shape, dtype=wide)
    if touched is not None:
        result[touched.indices] = touched.values
    for whole, weight in dense:
        result.add_(whole.view(shape).to(wide), alpha=weight)
    return result.to(dtype)


def _weighted(part: Touched, weight: float, dtype: torch.dtype) -> Touched:
    return Touched(part.indices, part.values.to(dtype) * weight, part.counts, part.uses, part.strided)


def merge(parts: Sequence[Touched], *, divide: bool = False) -> Touched:
    """One set of rows of several, those of one index summed in the order given; what has counts only if `divide`.

    Args:
        divide: rows that have counts are divided by the sum of all counts of their index in their use.
    """
    strided = any(part.strided for part in parts)
    indices = torch.cat([part.indices for part in parts])
    values = torch.cat([part.values for part in parts])
    counted = any(part.counts is not None for part in parts)
    if counted:
        counts = torch.cat([_or_zero(part.counts, part) for part in parts])
        uses = torch.cat([_or_zero(part.uses, part) for part in parts])
        if not divide:
            return Touched(indices, values, counts, uses, strided)
        values = values / _totals(indices, counts, uses).to(values.dtype).unsqueeze(1)
    distinct, place = torch.unique(indices, return_inverse=True)
    return Touched(distinct, sum_rows(values, place, len(distinct)), strided=strided)


def sum_rows(values: torch.Tensor, place: torch.Tensor, n: int) -> torch.Tensor:
    """[n, D]: row i is the sum of those of `values`, [k, D], whose `place`, [k], is i; in the same order every time."""
    if values.is_cuda:  # where index_add_ adds in any order; this sorts first
        result: torch.Tensor = torch.ops.aten.embedding_dense_backward(values, place, n, -1, False)
        return result
    return values.new_zeros(n, values.shape[1]).index_add_(0, place, values)


def _or_zero(column: torch.Tensor | None, part: Touched) -> torch.Tensor:
    return torch.zeros_like(part.indices) if column is None else column


def _totals(indices: torch.Tensor, counts: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    """By row, what it is to be divided by: 1 where it was not counted."""
    keys = torch.stack([uses, counts.sign(), indices])
    distinct, place = torch.unique(keys, dim=1, return_inverse=True)
    return torch.zeros_like(distinct[0]).index_add_(0, place, counts)[place].clamp(min=1)
