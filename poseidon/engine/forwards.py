"""Forward passes of the root module, and the rows that a step's gradient is a mean over."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

log = logging.getLogger("poseidon")


def leading_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The first dimension of the first tensor argument (the length, if it is a list); None without one."""
    first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor | list)), None)
    if isinstance(first, torch.Tensor):
        return first.shape[0] if first.dim() else 1
    return None if first is None else len(first)


class Forward:
    """One forward pass with grad enabled.

    Attributes:
        rows: of its input; None: unknown.
        hooked: it has outputs whose gradient can be watched.
        reached: autograd's id of the backward pass that came through its outputs.
    """

    def __init__(self, rows: int | None) -> None:
        self.rows = rows
        self.hooked = False
        self.reached: int | None = None
        self._reach: weakref.ref[Reach] | None = None

    @classmethod
    def begin(cls, rows: int | None, then: Callable[[], None]) -> tuple[Forward, Reach]:
        """A forward pass, and the hook for its outputs, which calls `then`."""
        forward = cls(rows)
        reach = Reach(forward, then)
        forward._reach = weakref.ref(reach)
        return forward, reach

    def alive(self) -> bool:
        """Is, or may yet be, a part of the gradient: not if its graph was dropped before any backward pass
        came through, as that of an evaluation without ``torch.no_grad()``. The graph owns the hook."""
        return self.reached is not None or not self.hooked or (self._reach is not None and self._reach() is not None)


class Reach:
    """Hook of an output's gradient."""

    def __init__(self, forward: Forward, then: Callable[[], None]) -> None:
        self._forward, self._then = forward, then

    def __call__(self, grad: torch.Tensor) -> None:
        self._forward.reached = torch._C._current_graph_task_id()
        self._then()


class StepRows:
    """n_r: the rows that this rank's gradient of a round is a mean over.

    A step may have several rounds (backward passes): what session.rows() said holds for all of them, and a pass
    without a forward of its own is over the rows of the last one.

    Attributes:
        explicit: what session.rows() said of the next round; None: nothing.
        forwards: of the root module, that are or may yet be a part of the gradient.
    """

    def __init__(self, equal: bool) -> None:
        self._equal = equal  # all ranks weigh the same, whatever their rows
        self.explicit: int | None = None
        self.forwards: list[Forward] = []
        self._said: tuple[int, bool] | None = None  # of this step's last round, and was it explicit?
        self._fixed: int | None = None
        self._warned = False

    def settle(self, produced: Callable[[], bool], *, absent: bool = False) -> int:
        """The weight of this round's contribution; fixed when its first unit leaves.

        Args:
            produced: whether there is any gradient.
            absent: this rank only goes along.
        """
        if self._fixed is None:
            self._said = self._of_step(produced)
            self._fixed = 1 if self._equal and not absent else self._said[0]
        return self._fixed

    def _of_step(self, produced: Callable[[], bool]) -> tuple[int, bool]:
        if self.explicit is not None:
            return self.explicit, True
        seen = [forward.rows for forward in self.forwards if forward.alive() and forward.rows is not None]
        if self._said is not None and (self._said[1] or not seen):
            return self._said
        if seen or not produced():
            return sum(seen), False
        return 1, False  # gradients without a forward of the root module: nothing tells its rows

    def new_round(self) -> None:
        self._fixed = None

    def round_closed(self) -> None:
        self.explicit = None
        self.forwards.clear()

    def step_begins(self) -> None:
        self._said = None

    def drop(self, task: int | None) -> None:
        """Forget the forwards that an aborted backward pass came through."""
        self.forwards = [forward for forward in self.forwards if forward.reached != task]

    def unreach(self, task: int | None) -> None:
        """That pass was an ``autograd.grad()`` of something else: no part of the gradient."""
        for forward in self.forwards:
            if forward.reached == task:
                forward.reached = None

    def warn_uneven(self, rows: Mapping[int, int]) -> None:
        """Once, if they differ and were read off the data.

        Args:
            rows: n_r by rank, of the round that closes.
        """
        explicit = (self._said is not None and self._said[1]) or self._equal
        if self._warned or explicit or len(set(rows.values())) < 2:
            return
        self._warned = True
        counts = ", ".join(f"rank {rank}: {rows[rank]}" for rank in sorted(rows))
        log.warning(
            "ranks had different numbers of rows (%s): their gradients are weighted with them. Rows are read off the "
            "first tensor given to the model, which is wrong for sequence-first input, for means over unpadded "
            "tokens and for sums: call session.rows(n) before backward(), or distribute(..., rows='equal')",
            counts,
        )
