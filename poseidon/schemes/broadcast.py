"""From every rank to every other: what SFB and rows have in common.

What a rank has in a round is not fixed by the plan (a weight may be used otherwise than planned, or not at all):
a message says whether it carries what the scheme is made for, a dense gradient, or the word that there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from poseidon.planning import Unit
from poseidon.schemes.base import Context, Contribution
from poseidon.schemes.memory import from_bytes, raw
from poseidon.transport import Header, Kind


class Message(NamedTuple):
    """A contribution on its way: `data` is 1-D and stays as it is until it has been sent; `detail` and `k` go into
    the header, the former as `pair`."""

    kind: Kind
    data: torch.Tensor | None = None
    detail: int = 0
    k: int = 0


class Broadcast:
    """One weight's contributions, to and from every peer.

    A scheme gives `pack`, `unpack` and `size`, and in `name` and `what` how it is called and what it waits for.
    """

    name: str
    what: str

    def __init__(self, unit: Unit, context: Context) -> None:
        self.unit = unit
        self._context = context
        self._round = 0
        # A peer may be one round ahead.
        self._rounds: dict[int, dict[int, Contribution]] = {}
        self._partial: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def pack(self, contribution: Contribution) -> Message:
        raise NotImplementedError

    def unpack(self, header: Header, data: torch.Tensor) -> Contribution:
        """From the bytes of a whole transfer, of the size that `size` gave."""
        raise NotImplementedError

    def size(self, header: Header) -> int:
        """Bytes of the transfer that `header` announces.

        Raises:
            RuntimeError: it announces nothing that can be.
        """
        raise NotImplementedError

    def contribute(self, round_: int, contribution: Contribution) -> None:
        """Broadcast. `dense` may be overwritten from the end of this round on, all else two rounds later."""
        context = self._context
        self._round = round_
        message = self.pack(contribution)
        header = Header(
            message.kind,
            context.rank,
            context.model,
            context.plan,
            round_,
            unit=self.unit.index,
            pair=message.detail,
            rows=contribution.rows,
            k=message.k,
        )
        self.send(self.peers(), header, memoryview(b"") if message.data is None else raw(message.data))
        self.add(round_, context.rank, contribution)

    def peers(self) -> Iterable[int]:
        """Who gets contributions. Every rank begins with another one, so that nobody is sent to by all at once."""
        rank, size = self._context.rank, self._context.world_size
        return [(rank + step) % size for step in range(1, size)]

    def send(self, peers: Iterable[int], header: Header, data: memoryview) -> None:
        """In pieces, each to all of them."""
        context = self._context
        for offset in range(0, max(1, data.nbytes), context.piece_bytes):
            piece = data[offset : offset + context.piece_bytes]
            for peer in peers:
                context.send(peer, header._replace(offset=offset, total=data.nbytes), piece)

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.NONE:
            self.add(header.round, header.rank, Contribution(header.rows))
            return
        size = self.size(header)
        if header.total != size:
            raise RuntimeError(
                f"{header.kind.name} of {header.k} rows for unit {self.unit.index} has {header.total} bytes, not {size}"
            )
        data = self.assemble(header, payload)
        if data is not None:
            self.add(header.round, header.rank, self.unpack(header, data))

    def waits_for(self) -> list[tuple[str, int]]:
        got = self._rounds.get(self._round)
        if got is None:  # complete, or not begun
            return []
        return [(self.what, rank) for rank in range(self._context.world_size) if rank not in got]

    def not_mine(self, header: Header) -> RuntimeError:
        return RuntimeError(f"{header.kind.name} for unit {self.unit.index}, which goes by {self.name}")

    def assemble(self, header: Header, payload: memoryview) -> torch.Tensor | None:
        """The whole transfer as bytes, once all its pieces are here."""
        if header.length == header.total:
            return from_bytes(payload, torch.uint8)
        key = (header.round, header.rank)
        buffer, got = self._partial.get(key) or (torch.empty(header.total, dtype=torch.uint8), 0)
        if buffer.numel() != header.total:
            raise RuntimeError(f"pieces of one {header.kind.name} for unit {self.unit.index} differ in their total")
        buffer[header.offset : header.offset + header.length].copy_(torch.frombuffer(payload, dtype=torch.uint8))
        got += header.length
        if got == header.total:
            self._partial.pop(key, None)
            return buffer
        self._partial[key] = (buffer, got)
        return None

    def add(self, round_: int, rank: int, contribution: Contribution) -> None:
        """A rank's contribution is whole."""
        got = self._rounds.setdefault(round_, {})
        if rank in got:
            raise RuntimeError(f"rank {rank} contributed twice to one round")
        got[rank] = contribution
        if len(got) == self._context.world_size:
            del self._rounds[round_]
            self.complete(round_, [got[r] for r in range(self._context.world_size)])

    def complete(self, round_: int, contributions: list[Contribution]) -> None:
        """All ranks' contributions are here, in rank order."""
        self._context.done(self.unit.index, contributions)


def dense_copy(contribution: Contribution) -> torch.Tensor | None:
    """The dense gradient as it is sent. Copied: the result is written to where it lies, while it may still be on
    its way."""
    return None if contribution.dense is None else contribution.dense.clone()


def as_type(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a 1-D tensor; copied where they are not aligned."""
    return from_bytes(raw(data), dtype)


def weights(contributions: list[Contribution]) -> list[float]:
    """n_r / N by rank; of equal n_r all 1/P. 0 for a rank without rows, which contributes nothing, whatever it sent."""
    rows = [c.rows for c in contributions]
    if not any(rows):
        return [0.0] * len(rows)
    equal = len(set(rows)) == 1
    return [1 / len(rows) if equal else n / sum(rows) for n in rows]
