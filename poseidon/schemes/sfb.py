"""SFB: sufficient factors go from every worker to every other, who multiply them out (P15, section 4.2; P17, 3.2).

What is not a product of factors on some rank in some round (a weight used elsewhere too, or not at all)
goes the same way as a dense gradient, or as the word that there is none: routes are fixed, payloads are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.planning import Unit
from poseidon.schemes.average import accumulator_dtype
from poseidon.schemes.base import Context, Contribution
from poseidon.schemes.memory import from_bytes, raw
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


class SFB:
    """One weight's factors, to and from every peer."""

    def __init__(self, unit: Unit, context: Context) -> None:
        self.unit = unit
        self._context = context
        self._round = 0
        # A peer may be one round ahead.
        self._rounds: dict[int, dict[int, Contribution]] = {}
        self._partial: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def contribute(self, round_: int, contribution: Contribution) -> None:
        """Broadcast. `factors` must stay as they are for two rounds, `dense` until the end of this one."""
        context = self._context
        self._round = round_
        kind, tensor = Kind.NONE, None
        if contribution.factors is not None:
            kind, tensor = Kind.FACTORS, contribution.factors
        elif contribution.dense is not None:
            # Copied: the result is written to where this gradient lies, while it may still be on its way.
            kind, tensor = Kind.DENSE, contribution.dense.clone()
        dtype = _DTYPES.index(tensor.dtype) if tensor is not None else 0
        header = Header(
            kind,
            context.rank,
            context.model,
            context.plan,
            round_,
            self.unit.index,
            dtype,
            contribution.rows,
            contribution.k,
        )
        data = memoryview(b"") if tensor is None else raw(tensor)
        for offset in range(0, max(1, data.nbytes), context.piece_bytes):
            piece = data[offset : offset + context.piece_bytes]
            for step in range(1, context.world_size):
                peer = (context.rank + step) % context.world_size
                context.send(peer, header._replace(offset=offset, total=data.nbytes), piece)
        self._add(round_, context.rank, contribution)

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.NONE:
            self._add(header.round, header.rank, Contribution(header.rows))
            return
        data = self._assemble(header, payload)
        if data is None:
            return
        tensor = data.view(_DTYPES[header.pair])
        if header.kind is Kind.FACTORS:
            contribution = Contribution(header.rows, factors=tensor, k=header.k)
        elif header.kind is Kind.DENSE:
            contribution = Contribution(header.rows, dense=tensor)
        else:
            raise RuntimeError(f"{header.kind.name} for unit {self.unit.index}, which goes by SFB")
        self._add(header.round, header.rank, contribution)

    def waits_for(self) -> list[tuple[str, int]]:
        got = self._rounds.get(self._round)
        if got is None:  # complete, or not begun
            return []
        return [("factors", rank) for rank in range(self._context.world_size) if rank not in got]

    def _assemble(self, header: Header, payload: memoryview) -> torch.Tensor | None:
        """The whole transfer as bytes, once all its pieces are here."""
        if header.length == header.total:
            return from_bytes(payload, _DTYPES[header.pair]).view(torch.uint8)
        key = (header.round, header.rank)
        buffer, got = self._partial.get(key) or (torch.empty(header.total, dtype=torch.uint8), 0)
        buffer[header.offset : header.offset + header.length].copy_(torch.frombuffer(payload, dtype=torch.uint8))
        got += header.length
        if got == header.total:
            self._partial.pop(key, None)
            return buffer
        self._partial[key] = (buffer, got)
        return None

    def _add(self, round_: int, rank: int, contribution: Contribution) -> None:
        got = self._rounds.setdefault(round_, {})
        if rank in got:
            raise RuntimeError(f"rank {rank} contributed twice to one round")
        got[rank] = contribution
        if len(got) == self._context.world_size:
            del self._rounds[round_]
            self._context.done(self.unit.index, [got[r] for r in range(self._context.world_size)])


def reconstruct(contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """The averaged M x N gradient from all ranks' contributions, in rank order; None if no rank has one.

    One multiplication of the concatenated factors, then dense parts: the same operations on the same bytes
    on every rank, hence the same bits. Factors narrower than `dtype` (autocast) are multiplied as they are,
    as one process under autocast would. A rank without rows contributes nothing, whatever it sent.
    """
    m, n = shape
    rows = [c.rows for c in contributions]
    equal = len(set(rows)) == 1
    weighted = [(c, 1 / len(rows) if equal else c.rows / sum(rows)) for c in contributions if c.rows]
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
