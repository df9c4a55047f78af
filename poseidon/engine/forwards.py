"""Forward passes of the root module, and the rows that a step's gradient is a mean over."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from poseidon.engine.inputs import Reading

log = logging.getLogger("poseidon")

_REMEDY = "call session.rows(n) before backward(), or distribute(..., rows='equal')"
_LIST = (
    "the model was given a list of tensors that all have the same first dimension: the list's length was taken for the "
    "number of rows"
)
_NO_OUTPUT = (
    "gradients came through no output of the model (a loss kept as an attribute): the rows of its last forward pass "
    "were taken"
)
_NO_FORWARD = (
    "gradients came without a forward pass of the model whose input shows its rows (another method called instead of "
    "model(x), an input without tensors, gradients assigned by hand): this rank's count as one row"
)


class Forward:
    """One forward pass with grad enabled.

    Attributes:
        rows: of its input; None: unknown, or no concern of this step's.
        certain: `rows` is no guess.
        hooked: it has outputs whose gradient can be watched.
        reached: autograd's id of the backward pass that came through its outputs.
        looked: ``autograd.grad()`` came through them.
    """

    def __init__(self, rows: int | None, certain: bool) -> None:
        self.rows, self.certain = rows, certain
        self.hooked = self.looked = False
        self.reached: int | None = None
        self._reach: weakref.ref[Reach] | None = None

    def hook(self, outputs: Iterable[torch.Tensor], then: Callable[[Forward], None]) -> None:
        """Let ``then(self)`` run when a gradient comes to one of `outputs`. The graph owns the hook."""
        reach = Reach(self, then)
        for t in outputs:
            # A view that is changed in place later has another place in the graph, its base has not. Leaves (a
            # parameter as it is) would keep the hook for ever.
            base = t._base
            watched = base if base is not None and base.grad_fn is not None else t
            if watched.grad_fn is not None:
                watched.register_hook(reach)
                self.hooked = True
        self._reach = weakref.ref(reach)

    def waits(self) -> bool:
        """May it yet become a part of the gradient? Not if its graph was dropped."""
        return (
            self.hooked
            and self.rows is not None
            and self.reached is None
            and not self.looked
            and self._reach is not None
            and self._reach() is not None
        )


class Reach:
    """Hook of an output's gradient."""

    def __init__(self, forward: Forward, then: Callable[[Forward], None]) -> None:
        self._forward, self._then = forward, then

    def __call__(self, grad: torch.Tensor) -> None:
        self._forward.reached = torch._C._current_graph_task_id()
        self._then(self._forward)


class StepRows:
    """n_r: the rows that this rank's gradient of a round is a mean over.

    A step may have several rounds (backward passes): what session.rows() said holds for all of them, and a pass
    without a forward of its own is over the rows of the last one.

    Attributes:
        explicit: what session.rows() said of the next round; None: nothing.
        forwards: of the root module, that are or may yet be a part of the gradient.
        doubt: what is uncertain about this round's rows.
    """

    def __init__(self, equal: bool) -> None:
        self._equal = equal  # all ranks weigh the same, whatever their rows
        self.explicit: int | None = None
        self.forwards: dict[Forward, None] = {}
        self.doubt: str | None = None
        self._awaited: list[Forward] | None = None
        self._said: tuple[int, bool] | None = None  # of this step's last round, and was it explicit?
        self._fixed: int | None = None
        self._warned: set[str] = set()

    def begin(self, reading: Reading | None, outputs: list[torch.Tensor]) -> Forward:
        """A forward pass has ended."""
        rows, certain = (None, True) if reading is None else reading.settle(outputs)
        forward = Forward(rows, certain)
        self.forwards[forward] = None
        return forward

    def open(self) -> bool:
        """Is there a forward pass that a backward pass may yet come through?"""
        return any(forward.waits() for forward in self.forwards)

    def reach(self, forward: Forward) -> None:
        """A backward pass came through its outputs, perhaps not for the first time."""
        self.forwards.setdefault(forward)

    def waits(self) -> bool:
        """Is n_r open, since this backward pass may yet come through other forward passes?"""
        if self._fixed is not None or self.explicit is not None or self._equal or (self._said and self._said[1]):
            return False
        candidates = self.forwards if self._awaited is None else self._awaited
        self._awaited = [forward for forward in candidates if forward.waits()]
        return bool(self._awaited)

    def settle(self, produced: Callable[[], bool], *, absent: bool = False) -> int:
        """The weight of this round's contribution; fixed when its first unit leaves.

        Args:
            produced: whether there is any gradient.
            absent: this rank only goes along.
        """
        if self._fixed is None:
            self._said = self._of_round(produced)
            self._fixed = 1 if self._equal and not absent else self._said[0]
        return self._fixed

    def _of_round(self, produced: Callable[[], bool]) -> tuple[int, bool]:
        if self.explicit is not None:
            return self.explicit, True
        if self._said is not None and self._said[1]:
            return self._said
        known = [forward for forward in self.forwards if forward.rows is not None]
        reached = [forward for forward in known if forward.reached is not None]
        if reached:
            return self._sum(reached), False
        if self._said is not None:
            return self._said
        if not produced():
            return 0, False
        guessed = [f for f in known if f.looked] or [f for f in known if not f.hooked]
        if guessed:
            return self._sum(guessed), False
        if known and all(forward.reached is None for forward in self.forwards):
            self.doubt = _NO_OUTPUT
            return self._sum(known[-1:]), False
        self.doubt = _NO_FORWARD
        return 1, False

    def _sum(self, forwards: list[Forward]) -> int:
        if not all(forward.certain for forward in forwards):
            self.doubt = _LIST
        return sum(forward.rows or 0 for forward in forwards)

    def new_round(self) -> None:
        self._fixed = self._awaited = self.doubt = None

    def round_closed(self) -> None:
        self.explicit = None
        kept: dict[Forward, None] = {}
        for forward in self.forwards:
            if forward.waits():
                kept[forward] = None
            forward.reached, forward.looked = None, False
        self.forwards = kept

    def step_begins(self) -> None:
        self._said = None

    def drop(self, task: int | None) -> None:
        """Forget the forwards that an aborted backward pass came through."""
        self.forwards = {forward: None for forward in self.forwards if forward.reached != task}

    def unreach(self, task: int | None) -> None:
        """That pass was an ``autograd.grad()``: no part of the gradient, unless its result is assigned to it."""
        for forward in self.forwards:
            if forward.reached == task:
                forward.reached, forward.looked = None, True

    def warner(self) -> Callable[[int, Mapping[int, int]], None]:
        """Says what must be known of the round that closes, each thing once; takes this rank and n_r by rank, as far as
        heard."""
        quiet = self._equal or (self._said is not None and self._said[1])
        return (lambda rank, rows: None) if quiet else partial(self._warn, self.doubt)

    def _warn(self, doubt: str | None, rank: int, rows: Mapping[int, int]) -> None:
        # Where all ranks are in doubt, rank 0 says so for all.
        if doubt is not None and (rank == 0 or rows.get(0) != rows.get(rank)):
            self._once("%s; %s", f"rank {rank}: {doubt}", _REMEDY)
        if rank == 0 and len(set(rows.values())) > 1:
            self._once(
                "ranks have different numbers of rows (%s), and their gradients are weighted with them. That is right "
                "if the loss is a mean over the rows of the first tensor given to the model; if not (sequence-first "
                "input, means over unpadded tokens, sums): %s",
                ", ".join(f"rank {r}: {rows[r]}" for r in sorted(rows)),
                _REMEDY,
            )

    def _once(self, text: str, *args: Any) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *args)
