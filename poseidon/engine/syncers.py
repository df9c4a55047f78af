"""One plan at work: a syncer per unit, and the queue on which finished units come back to the training thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from poseidon.engine.device import Device
from poseidon.engine.exchange import Exchange
from poseidon.engine.gradients import Merged
from poseidon.errors import OutOfStepError
from poseidon.planning import Book
from poseidon.schemes import SFB, Context, Contribution, Share, make_scheme
from poseidon.transport import Header, Kind


def compare_steps(round_: int, steps: Mapping[int, int]) -> None:
    """Raises OutOfStepError unless both ranks have made as many optimizer steps before a round."""
    (one, its), (other, theirs) = steps.items()
    if its != theirs:
        raise OutOfStepError(
            f"{OutOfStepError.BEGINNING}: rank {one} has made {its} optimizer steps, rank {other} {theirs} before "
            f"backward pass {round_}: every rank must make the same number of backward passes per step "
            f"(session.no_sync() for all but the last) and of steps (or leave by session.join())"
        )


class Syncers:
    """Receiver of one (model, plan).

    Args:
        sparse: weights whose factors are coded where that makes them smaller.
    """

    def __init__(
        self,
        exchange: Exchange,
        model: int,
        plan: int,
        book: Book,
        dtypes: list[torch.dtype],
        piece_bytes: int,
        depth: int,
        device: Device,
        sparse: Collection[str] = (),
        *,
        front: bool = False,
    ) -> None:
        self.book = book
        self._front = front  # do front layers leave first?
        self._bell: Callable[[], None] | None = None  # called when a round begins elsewhere
        self._rows: dict[int, dict[int, int]] = {}  # by round: a rank may be a round ahead
        self._steps: dict[int, int] = {}  # by round: optimizer steps made before it
        self._their_steps: dict[int, dict[int, int]] = {}  # by round and rank, of rounds not begun here
        self._changed: tuple[int, int] | None = None  # a rank that goes by this plan no longer, and from which round on
        self._exchange, self._device = exchange, device
        self._model, self._plan, self._depth = model, plan, depth
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._pending: dict[tuple[int, int], None] = {}  # (round, unit) sent, whose result has not been taken
        self._schemes = [
            make_scheme(
                unit,
                Context(
                    exchange.rank,
                    book.topology,
                    model,
                    plan,
                    dtypes[unit.params[0]],
                    piece_bytes,
                    depth,
                    self._send,
                    self._finished,
                    device.multiplied,
                    self._summed,
                    has_values=device.has_values,
                    sparse=book.params[unit.params[0]].name in sparse,
                    work=exchange.coder.work,
                ),
            )
            for unit in book.units
        ]
        exchange.watch(self._done)
        exchange.open(model, plan, self)

    def listen(self, bell: Callable[[], None] | None) -> None:
        """Training thread: call `bell`, in the endpoint's thread, when a round begins elsewhere: as long as this rank
        only goes along."""
        self._bell = bell
        self._exchange.endpoint.post(partial(self._exchange.guarded, self._check_changed, "cannot go along"))

    def leave(self, round_: int) -> None:
        """Training thread: from this round on this rank has other parameters, and so must all others."""
        header = Header(Kind.CHANGED, self._exchange.rank, self._model, self._plan, round_)

        def call() -> None:
            for peer in range(self._exchange.world_size):
                if peer != self._exchange.rank:
                    self._exchange.endpoint.send(peer, header, None)

        self._exchange.endpoint.post(partial(self._exchange.guarded, call, "cannot tell of changed parameters"))

    def _check_changed(self) -> None:
        """Nobody waits for those who never come: they wait for this rank's agreement, it for their gradients."""
        if self._changed is None:
            return
        rank, round_ = self._changed
        if round_ in self._steps:
            why = f"rank {self._exchange.rank} began it with those of before: change them on every rank, between steps"
        elif self._bell is not None:
            why = f"rank {self._exchange.rank} has left the loop by session.join(): change them outside of it"
        else:
            return
        raise OutOfStepError(
            f"{OutOfStepError.BEGINNING}: rank {rank} had other parameters (unfrozen, added, replaced, of another type "
            f"or shape) before backward pass {round_}, but {why}"
        )

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.CHANGED:
            self._changed = (header.rank, header.round)
            self._check_changed()
            return
        if header.round in self._steps:
            if header.step != self._steps[header.round]:
                self._compare(header.rank, header.step, header.round)
        else:
            self._their_steps.setdefault(header.round, {})[header.rank] = header.step
            if self._bell is not None:
                self._bell()
        if header.kind is Kind.BEGIN:
            return
        if header.rows:
            self._rows.setdefault(header.round, {})[header.rank] = header.rows
        self._schemes[header.unit].on_message(header, payload)

    def _finished(self, round_: int, unit: int, result: Any) -> None:
        nbytes, merged = self._foreign_bytes(unit, result), self.book.units[unit].merged
        if self.book.units[unit].scheme == "rows":  # which are put together on the host, where they are
            self._device.to_device(None, nbytes, lambda _: self._done.put((round_, unit, result, None)))
            return
        # Flags are read here, before they move: looking at them on a device would make everything wait for it.
        flags = result[-len(self.book.units[unit].params) :].tolist() if merged and result is not None else None
        self._device.to_device(result, nbytes, lambda there: self._done.put((round_, unit, there, flags)))

    def _foreign_bytes(self, unit: int, result: Any) -> int:
        """Of a result, what has come from elsewhere."""
        if isinstance(result, Share):
            result = result.contributions
        if isinstance(result, list):
            return sum(c.nbytes for rank, c in enumerate(result) if rank != self._exchange.rank)
        if result is None:
            return 0
        topology, rank = self.book.topology, self._exchange.rank
        own = 0
        if self.book.units[unit].scheme == "sfb" and topology.divides:  # of blocks, one of which is this device's
            own = len(topology.part(rank, result.shape[0])) * result.shape[1] * result.itemsize
        return int(result.nbytes) - own

    def _summed(self, nbytes: int, call: Callable[[], None]) -> None:
        guarded = partial(self._exchange.guarded, call, "cannot sum")
        self._device.summed(nbytes, guarded, self._exchange.endpoint.post)

    def _send(self, peer: int, header: Header, payload: Any) -> None:
        if header.rank == self._exchange.rank:  # else it is only handed on, perhaps before this rank begins the round
            header = header._replace(step=self._steps[header.round])
        self._exchange.send(peer, header, payload, self.book.priority(header.round, header.unit, front=self._front))

    def _begin(self, round_: int, step: int) -> None:
        """Endpoint's thread, before anything of a round is sent."""
        if round_ in self._steps:
            return
        self._steps = {old: its for old, its in self._steps.items() if old > round_ - self._depth} | {round_: step}
        for rank, theirs in self._their_steps.pop(round_, {}).items():
            self._compare(rank, theirs, round_)
        self._check_changed()
        for rank in self._exchange.through():
            self.on_through(rank)

    def on_through(self, rank: int) -> None:
        """A rank that only goes along need not be sent anything of a round, and must know that there is one."""
        if self._steps:
            newest = max(self._steps)
            header = Header(Kind.BEGIN, self._exchange.rank, self._model, self._plan, newest, step=self._steps[newest])
            self._exchange.endpoint.send(rank, header, None)

    def _compare(self, rank: int, theirs: int, round_: int) -> None:
        compare_steps(round_, {self._exchange.rank: self._steps[round_], rank: theirs})

    def contribute(self, round_: int, step: int, unit: int, contribution: Contribution) -> None:
        """Training thread: this rank's part of a unit is final; ``step``: optimizer steps it has made so far."""
        self._rows.setdefault(round_, {})[self._exchange.rank] = contribution.rows
        self._pending[round_, unit] = None

        def call(on_host: Contribution) -> None:
            self._begin(round_, step)
            self._schemes[unit].contribute(round_, on_host)

        self._to_host(contribution, contribution.nbytes, call, f"cannot send unit {unit} in round {round_}")

    def _to_host(self, value: Any, nbytes: int, call: Callable[[Any], None], what: str) -> None:
        """Once the host has `value`, `call` gets it, in the endpoint's thread."""
        exchange = self._exchange
        self._device.to_host(
            value, nbytes, lambda moved: exchange.endpoint.post(partial(exchange.guarded, partial(call, moved), what))
        )

    def step_elsewhere(self, round_: int) -> int | None:
        """Training thread: optimizer steps that a rank had made which has begun this round; None if none has."""
        return next(iter(dict(self._their_steps.get(round_, {})).values()), None)

    def rows_of(self, round_: int) -> dict[int, int]:
        """Training thread: n_r of each rank, as far as heard, in a round; older rounds are forgotten."""
        for old in [other for other in list(self._rows) if other < round_]:
            del self._rows[old]
        return dict(self._rows.get(round_, {}))

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def take(self) -> tuple[int, int, Any]:
        """Training thread: the next finished unit, in order of completion: its round, number and result."""
        return self._taken(self._exchange.take(self._done, self.waits_for))

    def poll(self) -> tuple[int, int, Any] | None:
        """Training thread: the same, if there is one by now."""
        with contextlib.suppress(Empty):
            while (item := self._done.get_nowait()) is None:
                self._exchange.check()
            return self._taken(item)
        return None

    def _taken(self, item: tuple[int, int, Any, list[float] | None]) -> tuple[int, int, Any]:
        round_, unit, moved, flags = item
        result = self._device.received(moved)
        if not isinstance(result, Share):  # else the whole comes later
            self._pending.pop((round_, unit))
        return round_, unit, result if flags is None else Merged(result, flags)

    def share(self, round_: int, unit: int, rows: range, values: torch.Tensor) -> None:
        """Training thread: of a :class:`Share`, what this rank has multiplied out."""
        scheme = self._schemes[unit]
        assert isinstance(scheme, SFB)
        call = partial(scheme.share, round_, rows.start)
        self._to_host(values, values.nbytes, call, f"cannot share unit {unit} in round {round_}")

    @property
    def oldest(self) -> int | None:
        """The first round some of whose results are not in."""
        return min((round_ for round_, _ in list(self._pending)), default=None)

    def waits_for(self) -> list[tuple[str, int]]:
        """What is missing of the oldest round, by layer and phase, and from whom."""
        oldest, result = self.oldest, []
        for round_, unit in list(self._pending):
            if round_ != oldest:
                continue
            first = self.book.params[self.book.units[unit].params[0]]
            where = f"layer {first.layer or '(root)'}, iteration {round_}"
            for phase, rank in self._schemes[unit].waits_for():
                if rank != self._exchange.rank:
                    result.append((f"{phase} of {where}", rank))
        return result

    def close(self) -> None:
        self._exchange.unwatch(self._done)
        self._exchange.shut(self._model, self._plan)
