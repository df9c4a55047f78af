"""From every rank to every other: what SFB and rows have in common.

To another node a contribution goes once: to the sender's delegate there, who hands it on as it is to the other
devices of that node.

What a rank has in a round is not fixed by the plan (a weight may be used otherwise than planned, or not at all):
a message says whether it carries what the scheme is made for, a dense gradient, or the word that there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from poseidon.planning import Unit
from poseidon.schemes.base import Context, Contribution
from poseidon.schemes.memory import from_bytes, raw
from poseidon.transport import Header, Kind


class Message(NamedTuple):
    """A contribution on its way: `data` is 1-D and stays as it is until it has been sent; `detail` and `k` go into
    the header, the former as `pair`, and so does `dense`, its bytes before they were coded (0: they are not)."""

    kind: Kind
    data: torch.Tensor | None = None
    detail: int = 0
    k: int = 0
    dense: int = 0


class Broadcast:
    """One weight's contributions, to and from every peer.

    A scheme gives `pack`, `unpack` and `size`, and in `name` and `what` how it is called and what it waits for.
    """

    name: str
    what: str

    def __init__(self, unit: Unit, context: Context) -> None:
        self.unit = unit
        self._context = context
        self._beside = context.topology.beside(context.rank)
        self._contributed: dict[int, None] = {}  # rounds that are not complete
        # A peer may be ahead.
        self._rounds: dict[int, dict[int, Contribution]] = {}
        self._decoding: set[tuple[int, int]] = set()  # (round, rank) of what has come, but is not added yet
        self._partial: dict[tuple[int, int, Kind], tuple[torch.Tensor, int]] = {}

    def pack(self, contribution: Contribution) -> Message:
        raise NotImplementedError

    def unpack(self, header: Header, data: torch.Tensor) -> Contribution:
        """From the bytes of a whole transfer, of the size that `size` gave."""
        raise NotImplementedError

    def size(self, header: Header) -> int:
        """Bytes of the transfer that `header` announces, before they were coded.

        Raises:
            RuntimeError: it announces nothing that can be.
        """
        raise NotImplementedError

    def sparse(self, header: Header) -> bool:
        """Does `header` say that its transfer is coded?"""
        return False

    def contribute(self, round_: int, contribution: Contribution) -> None:
        """Broadcast. `dense` may be overwritten from the end of this round on, all else two rounds later."""
        self._contributed[round_] = None
        leave = partial(self._leave, round_, contribution)
        if self._context.sparse and contribution.factors is not None:
            self._context.work(partial(list, self.outgoing(contribution)), leave)
        else:
            leave(self.outgoing(contribution))

    def _leave(
        self, round_: int, contribution: Contribution, messages: Iterable[tuple[Iterable[int], Message]]
    ) -> None:
        """To the others first: a rank that has a round's result has sent all that others need for it."""
        context = self._context
        for peers, message in messages:
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
                dense=message.dense,
            )
            self.send(peers, header, memoryview(b"") if message.data is None else raw(message.data))
        self.add(round_, context.rank, contribution)

    def outgoing(self, contribution: Contribution) -> Iterator[tuple[Iterable[int], Message]]:
        """To whom goes what."""
        yield self.peers(), self.pack(contribution)

    def peers(self) -> Iterable[int]:
        """Who gets contributions: a delegate on every other node, and the other devices of this one."""
        rank, topology = self._context.rank, self._context.topology
        return [*topology.delegates(rank, self._key(rank)), *self._beside]

    def hand_on(self, header: Header, payload: memoryview, peers: Iterable[int]) -> None:
        """To `peers`, other devices of this node, what has come from another node to this rank, their delegate."""
        rank, topology = self._context.rank, self._context.topology
        node = topology.node_of(rank)
        if not self._beside or header.rank in self._beside or node is None:
            return
        if topology.delegate(node, header.rank, self._key(header.rank)) == rank:
            for peer in peers:
                self._context.send(peer, header, payload)

    def _key(self, sender: int) -> int:
        """The devices of a node speak with those of another one each with one."""
        topology = self._context.topology
        return topology.device_of(sender) if topology.works(sender) else self.unit.index

    def send(self, peers: Iterable[int], header: Header, data: memoryview) -> None:
        """In pieces, each to all of them."""
        context = self._context
        for offset in range(0, max(1, data.nbytes), context.piece_bytes):
            piece = data[offset : offset + context.piece_bytes]
            for peer in peers:
                context.send(peer, header._replace(offset=offset, total=data.nbytes), piece)

    def on_message(self, header: Header, payload: memoryview) -> None:
        self.hand_on(header, payload, self._beside)
        self.receive(header, payload)

    def receive(self, header: Header, payload: memoryview) -> None:
        """A contribution, or a piece of one."""
        if header.kind is Kind.NONE:
            self.add(header.round, header.rank, Contribution(header.rows))
            return
        size, sparse = self.size(header), self.sparse(header)
        said = header.dense if sparse else header.total
        if said != size or bool(header.dense) != sparse:
            raise RuntimeError(
                f"{header.kind.name} of {header.k} rows for unit {self.unit.index} has {said} bytes, not {size}"
            )
        data = self.assemble(header, payload)
        if data is None:
            return
        if not sparse:
            self.add(header.round, header.rank, self.unpack(header, data))
            return
        key = (header.round, header.rank)
        self._decoding.add(key)

        def decoded(contribution: Contribution) -> None:
            self._decoding.discard(key)
            self.add(*key, contribution)

        self._context.work(partial(self.unpack, header, data), decoded)

    def waits_for(self) -> list[tuple[str, int]]:
        for round_ in self._contributed:
            return [self.missing(self.what, rank) for rank in self.not_come(round_)]
        return []

    def not_come(self, round_: int) -> list[int]:
        """The workers of which nothing has come in a round."""
        got = self._rounds.get(round_, {})
        return [r for r in self._context.topology.workers if r not in got and (round_, r) not in self._decoding]

    def owed_by(self) -> set[tuple[int, int]]:
        return {(round_, rank) for round_ in self._rounds for rank in self.not_come(round_)}

    def missing(self, what: str, rank: int) -> tuple[str, int]:
        """What has not come of a rank, and who is to hand it on."""
        me, topology = self._context.rank, self._context.topology
        node = topology.node_of(me)
        via = rank if node is None else topology.delegate(node, rank, self._key(rank))
        return (what, rank) if via in (rank, me) else (f"pull ({what} of rank {rank})", via)

    def not_mine(self, header: Header) -> RuntimeError:
        return RuntimeError(f"{header.kind.name} for unit {self.unit.index}, which goes by {self.name}")

    def assemble(self, header: Header, payload: memoryview) -> torch.Tensor | None:
        """The whole transfer as bytes, once all its pieces are here."""
        if header.length == header.total:
            return from_bytes(payload, torch.uint8)
        key = (header.round, header.rank, header.kind)
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
        workers = self._context.topology.workers
        if len(got) == len(workers):
            del self._rounds[round_]
            self._contributed.pop(round_, None)
            self.complete(round_, [got[rank] for rank in workers])

    def complete(self, round_: int, contributions: list[Contribution]) -> None:
        """All ranks' contributions are here, in rank order."""
        self._context.done(round_, self.unit.index, contributions)


def dense_copy(contribution: Contribution) -> torch.Tensor | None:
    """The dense gradient as it is sent. Copied: the result is written to where it lies, while it may still be on
    its way."""
    return None if contribution.dense is None else contribution.dense.clone().view(-1)


def as_type(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a 1-D tensor; copied where they are not aligned."""
    return from_bytes(raw(data), dtype)


def weighted(contributions: Sequence[Contribution]) -> list[tuple[float, Contribution]]:
    """Those that count, each with its weight."""
    return [(w, c) for w, c in zip(weights(contributions), contributions, strict=True) if w]


def weights(contributions: Sequence[Contribution]) -> list[float]:
    """n_r / N by rank; of equal n_r all 1/P. 0 for a rank without rows, which contributes nothing, whatever it sent."""
    rows = [c.rows for c in contributions]
    if not any(rows):
        return [0.0] * len(rows)
    equal = len(set(rows)) == 1
    return [1 / len(rows) if equal else n / sum(rows) for n in rows]
