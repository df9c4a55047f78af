"""SFB: sufficient factors go from every worker to every other, who multiply them out (P15, section 4.2; P17, 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poseidon.planning import Unit
from poseidon.schemes.average import accumulator_dtype
from poseidon.schemes.base import Context, Contribution, Share
from poseidon.schemes.broadcast import Broadcast, Message, as_type, dense_copy, weighted
from poseidon.schemes.coding import Coded, decode, encode, joined
from poseidon.schemes.memory import autocast_device, raw
from poseidon.transport import Header, Kind

#: A factor's element type, by the number that stands in the lowest bits of its header's `pair`: under autocast factors
#: are narrower than the weight.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)
#: Bits of `pair`: u, v is sparse in a coded transfer (see ``coding``).
_U_SPARSE, _V_SPARSE = 1 << 8, 1 << 9
_SPARSE = _U_SPARSE | _V_SPARSE


@dataclass
class Matrix:
    """A gradient put together from blocks, the ranks whose blocks have not come, and whether anything is in it."""

    whole: torch.Tensor
    missing: set[int]
    filled: bool = False


class SFB(Broadcast):
    """One weight's factors. Of a node with several devices each multiplies out a block of rows for all of them."""

    name, what = "SFB", "factors"

    def __init__(self, unit: Unit, context: Context) -> None:
        super().__init__(unit, context)
        self._part = unit.shape  # of the gradient what contributions from elsewhere make up
        self._matrices: dict[int, Matrix] = {}  # by round, where blocks are put together

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind is not Kind.BLOCK:
            super().on_message(header, payload)
            return
        m, n = self.unit.shape
        data = self.assemble(header, payload)
        if data is None:
            return
        values = as_type(data, self._context.dtype).view(-1, n)
        if header.rank not in self._beside or header.pair + len(values) > m:
            raise RuntimeError(f"a block of unit {self.unit.index} of rank {header.rank} begins at row {header.pair}")
        self._place(header.round, header.rank, header.pair, values)

    def complete(self, round_: int, contributions: list[Contribution]) -> None:
        context = self._context
        if not context.topology.divides:
            super().complete(round_, contributions)
        elif all(part is None for _, c in weighted(contributions) for part in (c.dense, c.factors)):
            context.done(round_, self.unit.index, None)
        else:
            rows = context.topology.part(context.rank, self.unit.shape[0])
            context.done(round_, self.unit.index, Share(contributions, rows))

    def share(self, round_: int, start: int, values: torch.Tensor) -> None:
        """This device's block, [rows, N], from row `start` on: to the others of its node."""
        context = self._context
        header = Header(Kind.BLOCK, context.rank, context.model, context.plan, round_, unit=self.unit.index, pair=start)
        self.send(self._beside, header, raw(values.view(-1)))
        self._place(round_, context.rank, start, values)

    def _place(self, round_: int, rank: int, start: int, values: torch.Tensor) -> None:
        """A block is here."""
        matrix = self._matrices.get(round_)
        if matrix is None:
            whole = torch.empty(self.unit.shape, dtype=self._context.dtype)
            matrix = self._matrices[round_] = Matrix(whole, {self._context.rank, *self._beside})
        if rank not in matrix.missing:
            raise RuntimeError(f"rank {rank} gave its block twice to one round")
        matrix.missing.remove(rank)
        if self._context.has_values:
            matrix.whole[start : start + len(values)] = values
        if not matrix.missing:
            del self._matrices[round_]
            self._context.done(round_, self.unit.index, matrix.whole)

    def waits_for(self) -> list[tuple[str, int]]:
        blocks = [("block", rank) for matrix in self._matrices.values() for rank in matrix.missing]
        return super().waits_for() or blocks

    def pack(self, contribution: Contribution) -> Message:
        factors, k = contribution.factors, contribution.k
        if factors is None or not self._context.sparse:
            return self.plain(contribution)
        u = k * self.unit.shape[0]
        coded = self.coded(encode(factors[:u]), encode(factors[u:]), factors.dtype, k, factors.nbytes)
        return coded or self.plain(contribution)

    def plain(self, contribution: Contribution) -> Message:
        factors = contribution.factors
        if factors is not None:
            return Message(Kind.FACTORS, factors, _DTYPES.index(factors.dtype), contribution.k)
        dense = dense_copy(contribution)
        return Message(Kind.NONE) if dense is None else Message(Kind.DENSE, dense)

    def coded(self, u: Coded, v: Coded, dtype: torch.dtype, k: int, dense: int) -> Message | None:
        """`dense`: bytes of both before. None: neither is sparse."""
        flags = (_U_SPARSE if len(u.bits) else 0) | (_V_SPARSE if len(v.bits) else 0)
        if not flags:
            return None
        return Message(Kind.FACTORS, joined([u, v]), _DTYPES.index(dtype) | flags, k, dense)

    def size(self, header: Header) -> int:
        if header.kind is Kind.DENSE:
            return math.prod(self._part) * self.unit.itemsize
        if header.kind is not Kind.FACTORS:
            raise self.not_mine(header)
        kind = header.pair & ~_SPARSE
        if kind >= len(_DTYPES):
            raise RuntimeError(f"factors of unknown type {kind} for unit {self.unit.index}")
        return header.k * sum(self._part) * _DTYPES[kind].itemsize

    def sparse(self, header: Header) -> bool:
        return header.kind is Kind.FACTORS and bool(header.pair & _SPARSE)

    def as_matrix(self, data: torch.Tensor) -> torch.Tensor:
        """From the bytes of a dense gradient."""
        return as_type(data, self._context.dtype).view(self._part)

    def unpack(self, header: Header, data: torch.Tensor) -> Contribution:
        if header.kind is Kind.DENSE:
            return Contribution(header.rows, dense=self.as_matrix(data))
        k, dtype = header.k, _DTYPES[header.pair & ~_SPARSE]
        if not self.sparse(header):
            return Contribution(header.rows, factors=as_type(data, dtype), k=k)
        sparse = [bool(header.pair & flag) for flag in (_U_SPARSE, _V_SPARSE)]
        try:
            factors = decode(data, [k * side for side in self._part], sparse, dtype)
        except RuntimeError as error:
            raise RuntimeError(f"rank {header.rank}, unit {self.unit.index}, round {header.round}: {error}") from None
        return Contribution(header.rows, factors=factors, k=k)


def reconstruct(
    contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype, rows: range | None = None
) -> torch.Tensor | None:
    """The averaged M x N gradient from all ranks' contributions, in rank order; None if no rank has one.

    Args:
        rows: of the gradient, the only ones that are wanted.

    One multiplication of the concatenated factors, then dense parts: the same operations on the same bytes
    on every rank, hence the same bits. Factors narrower than `dtype` (autocast) are multiplied as they are,
    as one process under autocast would. Where all tensors are on one device, there it is done.
    """
    m, n = shape
    wanted = range(m) if rows is None else rows
    counted = weighted(contributions)
    factored = [(c, w) for w, c in counted if c.factors is not None]
    dense = [(c.dense.view(m, n)[wanted.start : wanted.stop], w) for w, c in counted if c.dense is not None]
    if not factored and not dense:
        return None
    if factored and not dense:
        return _multiply(factored, m, n, wanted).to(dtype)
    wide = accumulator_dtype(dtype)
    result = _multiply(factored, m, n, wanted).to(wide) if factored else torch.zeros_like(dense[0][0], dtype=wide)
    for part, weight in dense:
        result.add_(part.to(wide), alpha=weight)
    return result.to(dtype)


def _multiply(parts: Sequence[tuple[Contribution, float]], m: int, n: int, wanted: range) -> torch.Tensor:
    k = sum(c.k for c, _ in parts)
    first = parts[0][0].factors
    assert first is not None
    u, v = first.new_empty(k, len(wanted)), first.new_empty(k, n)
    row = 0
    for c, weight in parts:
        assert c.factors is not None
        # The factor with the weight in it: K x M multiplications instead of M x N on the result.
        mine = c.factors[: c.k * m].view(c.k, m)[:, wanted.start : wanted.stop]
        torch.mul(mine, weight, out=u[row : row + c.k])
        v[row : row + c.k].copy_(c.factors[c.k * m :].view(c.k, n))
        row += c.k
    with torch.autocast(autocast_device(u), enabled=False):  # the user may read weights inside of it, on one rank alone
        return torch.mm(u.t(), v)
