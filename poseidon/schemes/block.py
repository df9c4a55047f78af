"""Block: factors go to the owners of blocks of the matrix, who multiply them, and the blocks come down to all (P15,
section 4.2, "factors up, matrix down", balanced).

Each product is made once, so that nobody multiplies more than its own gradient's worth, however many ranks there are;
SFB's every rank multiplies all of them. A block is what one owner made of it, hence the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from poseidon.planning import Unit
from poseidon.planning.blocks import Blocks
from poseidon.schemes.base import Context, Contribution
from poseidon.schemes.broadcast import Message, as_type
from poseidon.schemes.coding import encode
from poseidon.schemes.memory import raw
from poseidon.schemes.sfb import SFB, Matrix
from poseidon.transport import Header, Kind


class Block(SFB):
    """One weight's factors on the way up, blocks of its averaged gradient on the way down.

    To an owner goes what it needs of the factors, side by side; of a dense gradient, its block. That copies factors as
    often as they are sent; two transfers for each owner, one of them shared by all, would save the copy of the shorter
    factor and cost a message.
    """

    name, what = "block", "factors"

    def __init__(self, unit: Unit, context: Context) -> None:
        super().__init__(unit, context)
        self._blocks = blocks = Blocks(unit.shape, context.topology)
        self._mine = blocks.owned.get(context.rank)
        self._home = blocks.home(context.rank)
        self._near = [owner for owner in self._home.owners if owner in self._beside]
        self._part = blocks.shape(self._home.stretch)
        self._ways = blocks.ways(context.rank, self._key(context.rank)) if context.topology.works(context.rank) else []
        self._coming: dict[int, Matrix] = {}  # by round

    def contribute(self, round_: int, contribution: Contribution) -> None:
        # No block can be complete before.
        whole = torch.empty(self.unit.shape, dtype=self._context.dtype)
        self._coming[round_] = Matrix(whole, set(self._blocks.owned))
        super().contribute(round_, contribution)

    def outgoing(self, contribution: Contribution) -> Iterator[tuple[Iterable[int], Message]]:
        if self._context.sparse and contribution.factors is not None:
            yield from self._outgoing_sparse(contribution.factors, contribution)
            return
        for peers, stretch in self._ways:
            yield peers, self.pack(self._cut(contribution, self._blocks.whole, stretch))

    def _outgoing_sparse(
        self, factors: torch.Tensor, contribution: Contribution
    ) -> Iterator[tuple[Iterable[int], Message]]:
        """The factor that all owners need whole is coded once."""
        k, m, side = contribution.k, self.unit.shape[0], 0 if self._blocks.tall else 1
        parts = [factors[: k * m], factors[k * m :]]
        shared = encode(parts[1 - side])
        for peers, stretch in self._ways:
            cut = parts[side].view(k, len(self._blocks.whole))[:, stretch.start : stretch.stop]
            mine = encode(cut.contiguous().view(-1))
            u, v = (mine, shared) if side == 0 else (shared, mine)
            dense = k * sum(self._blocks.shape(stretch)) * factors.itemsize
            message = self.coded(u, v, factors.dtype, k, dense)
            yield peers, message or self.plain(self._cut(contribution, self._blocks.whole, stretch))

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind in (Kind.PULL, Kind.PULL_NONE):
            self.hand_on(header, payload, self._beside)
            self._on_block(header, payload)
            return
        self.hand_on(header, payload, self._near)
        if self._mine is not None:
            self.receive(header, payload)

    def _on_block(self, header: Header, payload: memoryview) -> None:
        stretch = self._blocks.owned.get(header.rank)
        size = self._blocks.numel(stretch) * self.unit.itemsize if stretch and header.kind is Kind.PULL else 0
        if stretch is None or header.total != size:
            raise RuntimeError(
                f"block of rank {header.rank} of unit {self.unit.index} has {header.total} bytes, not {size}"
            )
        if header.kind is Kind.PULL_NONE:
            self._arrived(header.round, header.rank, 0, None)
            return
        data = self.assemble(header, payload)
        if data is not None:
            values = as_type(data, self._context.dtype).view(self._blocks.shape(stretch))
            self._arrived(header.round, header.rank, stretch.start, values)

    def waits_for(self) -> list[tuple[str, int]]:
        me = self._context.rank
        for round_, matrix in self._coming.items():
            factors = self.not_come(round_) if me in matrix.missing else []
            blocks = [self.missing("block", owner) for owner in sorted(matrix.missing - {me})]
            return [self.missing(self.what, rank) for rank in factors] + blocks
        return []

    def add(self, round_: int, rank: int, contribution: Contribution) -> None:
        """Of an owner: what has come takes its host as long as adding up its block; the others only send."""
        if self._mine is None:
            return
        own = rank == self._context.rank
        part = self._cut(contribution, self._blocks.whole if own else self._home.stretch, self._mine)
        nothing = part.dense is None and part.factors is None
        nbytes = 0 if nothing else self._blocks.numel(self._mine) * self.unit.itemsize
        self._context.summed(nbytes, partial(super().add, round_, rank, part))

    def complete(self, round_: int, contributions: list[Contribution]) -> None:
        context, mine = self._context, self._mine
        assert mine is not None
        block = context.multiplied(contributions, torch.Size(self._blocks.shape(mine)), context.dtype)
        kind = Kind.PULL_NONE if block is None else Kind.PULL
        header = Header(kind, context.rank, context.model, context.plan, round_, unit=self.unit.index)
        self.send(self.peers(), header, memoryview(b"") if block is None else raw(block.view(-1)))
        if context.topology.works(context.rank):
            self._arrived(round_, context.rank, mine.start, block)

    def _arrived(self, round_: int, rank: int, start: int, values: torch.Tensor | None) -> None:
        """A block is here. It is copied: the user may change the whole while it is being sent."""
        matrix = self._coming[round_]
        if rank not in matrix.missing:
            raise RuntimeError(f"rank {rank} gave its block twice to one round")
        matrix.missing.remove(rank)
        if values is not None:
            matrix.filled = True
            if self._context.has_values:
                side = 0 if self._blocks.tall else 1
                matrix.whole.narrow(side, start, values.shape[side]).copy_(values)
        if not matrix.missing:
            del self._coming[round_]
            self._contributed.pop(round_, None)
            self._context.done(round_, self.unit.index, matrix.whole if matrix.filled else None)

    def _cut(self, contribution: Contribution, have: range, want: range) -> Contribution:
        """Of what makes up the stretch `have` of the gradient, what makes up `want` of it."""
        if have == want:
            return contribution
        (m, n), side = self._blocks.shape(have), 0 if self._blocks.tall else 1
        start, length = want.start - have.start, len(want)
        dense, factors, k = contribution.dense, contribution.factors, contribution.k
        if dense is not None:
            dense = dense.view(m, n).narrow(side, start, length)
        if factors is not None:
            parts = [factors[: k * m].view(k, m), factors[k * m :].view(k, n)]
            parts[side] = parts[side].narrow(1, start, length)
            factors = torch.cat([part.reshape(-1) for part in parts])
        return replace(contribution, dense=dense, factors=factors)
