"""SFB: sufficient factors go from every worker to every other, who multiply them out (P15, section 4.2; P17, 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.schemes.average import accumulator_dtype
from poseidon.schemes.base import Contribution
from poseidon.schemes.broadcast import Broadcast, Message, as_type, dense_copy, weights
from poseidon.transport import Header, Kind

#: A factor's element type, by the number that stands in its header's `pair`: under autocast factors are
#: narrower than the weight.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)


class SFB(Broadcast):
    """One weight's factors."""

    name, what = "SFB", "factors"

    def pack(self, contribution: Contribution) -> Message:
        factors = contribution.factors
        if factors is not None:
            return Message(Kind.FACTORS, factors, _DTYPES.index(factors.dtype), contribution.k)
        dense = dense_copy(contribution)
        return Message(Kind.NONE) if dense is None else Message(Kind.DENSE, dense)

    def size(self, header: Header) -> int:
        if header.kind is Kind.DENSE:
            return self.unit.nbytes
        if header.kind is not Kind.FACTORS:
            raise self.not_mine(header)
        if header.pair >= len(_DTYPES):
            raise RuntimeError(f"factors of unknown type {header.pair} for unit {self.unit.index}")
        return header.k * sum(self.unit.shape) * _DTYPES[header.pair].itemsize

    def as_matrix(self, data: torch.Tensor) -> torch.Tensor:
        """From the bytes of a dense gradient."""
        return as_type(data, self._context.dtype).view(self.unit.shape)

    def unpack(self, header: Header, data: torch.Tensor) -> Contribution:
        if header.kind is Kind.DENSE:
            return Contribution(header.rows, dense=self.as_matrix(data))
        return Contribution(header.rows, factors=as_type(data, _DTYPES[header.pair]), k=header.k)


def reconstruct(contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """The averaged M x N gradient from all ranks' contributions, in rank order; None if no rank has one.

    One multiplication of the concatenated factors, then dense parts: the same operations on the same bytes
    on every rank, hence the same bits. Factors narrower than `dtype` (autocast) are multiplied as they are,
    as one process under autocast would.
    """
    m, n = shape
    weighted = [(c, w) for c, w in zip(contributions, weights(list(contributions)), strict=True) if w]
    factored = [(c, w) for c, w in weighted if c.factors is not None]
    dense = [(c.dense.view(m, n), w) for c, w in weighted if c.dense is not None]
    if not factored and not dense:
        return None
    if factored and not dense:
        return _multiply(factored, m, n).to(dtype)
    wide = accumulator_dtype(dtype)
    result = _multiply(factored, m, n).to(wide) if factored else torch.zeros(m, n, dtype=wide)
    for part, weight in dense:
        result.add_(part.to(wide), alpha=weight)
    return result.to(dtype)


def _multiply(parts: Sequence[tuple[Contribution, float]], m: int, n: int) -> torch.Tensor:
    k = sum(c.k for c, _ in parts)
    kind = parts[0][0].factors.dtype  # type: ignore[union-attr]
    u, v = torch.empty(k, m, dtype=kind), torch.empty(k, n, dtype=kind)
    row = 0
    for c, weight in parts:
        assert c.factors is not None
        # The factor with the weight in it: K x M multiplications instead of M x N on the result.
        torch.mul(c.factors[: c.k * m].view(c.k, m), weight, out=u[row : row + c.k])
        v[row : row + c.k].copy_(c.factors[c.k * m :].view(c.k, n))
        row += c.k
    return torch.mm(u.t(), v)
