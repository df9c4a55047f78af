"""How one unit's gradient is made global: the interface between the engine and the schemes.

All methods run in the endpoint's thread. A scheme gets this rank's contribution and the peers' messages in
any order, and calls ``context.done(unit, result)`` once per round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from poseidon.planning import Topology, Unit
from poseidon.transport import Header


@dataclass(frozen=True)
class Touched:
    """The rows of a V x D gradient that are not zero.

    Attributes:
        indices: [k] int64; distinct among rows without counts, and among those of one use.
        values: [k, D], in the weight's type.
        counts: [k] int64, or None: how often the index was looked up in this use on this rank, where the sum over all
            ranks is to be divided by the sum of that (scale_grad_by_freq); 0: not to be divided.
        uses: [k] int64, or None: which of this round's uses of the weight that was, where there are counts.
        strided: the gradient is a strided tensor; else a sparse one (sparse=True).
    """

    indices: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor | None = None
    uses: torch.Tensor | None = None
    strided: bool = True


@dataclass(frozen=True)
class Contribution:
    """What one rank adds in one round.

    Attributes:
        rows: n_r, this rank's rows in the step (its weight in the average).
        dense: [unit.numel] flattened gradient, or None; of a block of it, a view.
        factors: [k * (M + N)] u (k x M), then v (k x N), flattened, or None.
        k: rows of the factors.
        touched: an embedding's rows, or None. None of the three: no gradient here.
        origin: of one that was copied to the host, itself as the device has it.
    """

    rows: int
    dense: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    k: int = 0
    touched: Touched | None = None
    origin: Contribution | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what it is made of."""
        touched = (self.touched.indices, self.touched.values) if self.touched is not None else ()
        return sum(part.nbytes for part in (self.dense, self.factors, *touched) if part is not None)


@dataclass(frozen=True)
class Share:
    """What one device of a node has to multiply out for all of them: rows of a weight's averaged gradient."""

    contributions: list[Contribution]
    rows: range


@dataclass(frozen=True)
class Context:
    """A unit's surroundings, handed to its scheme.

    Attributes:
        depth: rounds after which memory that was sent from may be written again (see Average).
        send: (peer, header, payload bytes): queue a message and count it.
        done: (round, unit index, result): the global gradient's parts are complete. Before that, of a weight that
            the devices of a node multiply out for each other, a :class:`Share` of the work.
        has_values: False: tensors have sizes only.
        sparse: factors of this rank are sent as bits and non-zeros where that is smaller (see ``coding``).
        work: (call, then): `call` in a thread that nobody's messages wait for, then `then`, with what it returned, in
            this one.
        summed: (bytes, call): `call` once this rank's host, as a server, may have added so many bytes.
        multiplied: (contributions, shape, dtype): the averaged gradient that this rank's host makes of them.
        piece_bytes: largest payload of one message.
    """

    rank: int
    topology: Topology
    model: int
    plan: int
    dtype: torch.dtype
    piece_bytes: int
    depth: int
    send: Callable[[int, Header, Any], None]
    done: Callable[[int, int, Any], None]
    multiplied: Callable[[Sequence[Contribution], torch.Size, torch.dtype], torch.Tensor | None]
    summed: Callable[[int, Callable[[], None]], None] = lambda nbytes, call: call()
    has_values: bool = True
    sparse: bool = False
    work: Callable[[Callable[[], Any], Callable[[Any], None]], None] = lambda call, then: then(call())


class Scheme(Protocol):
    unit: Unit

    def contribute(self, round_: int, contribution: Contribution) -> None:
        """This rank's gradient of the unit is final."""

    def on_message(self, header: Header, payload: memoryview) -> None:
        """A peer's message for this unit."""

    def waits_for(self) -> list[tuple[str, int]]:
        """(phase, rank) of what is missing; for diagnosis."""

    def owed_by(self) -> set[tuple[int, int]]:
        """Of a rank that only serves: (round, rank) where others have begun the round and wait for the rank."""
