"""The optimizers that step one model: when they do, and whether there was a backward pass before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from poseidon.engine.backward import Hook
from poseidon.engine.passing import stand_in
from poseidon.engine.steps import watch, within

log = logging.getLogger("poseidon")


class Stepping:
    """Calls of ``step()`` that concern one model.

    Args:
        concerns: does an optimizer, perhaps made after distribute(), hold parameters of the model?
        begins: called with the optimizer and its closure before every step, unless `ours`; gives what the step is to go
            on with, if not itself.

    Attributes:
        count: steps begun.
        meet: called before every step.
        ours: these steps are made by the engine itself.
        passes: those of the user go by, and change nothing.
    """

    def __init__(
        self,
        rank: int,
        concerns: Callable[[torch.optim.Optimizer], bool],
        begins: Callable[[torch.optim.Optimizer, object], torch.optim.Optimizer | None],
    ) -> None:
        self.count = 0
        self.meet: Callable[[torch.optim.Optimizer], None] | None = None
        self.ours = self.passes = False
        self._rank, self._concerns, self._begins = rank, concerns, begins
        self._since: set[int] | None = None  # optimizers that stepped since the last round closed; None: all
        self._warned = False
        self._unwatch: Callable[[], None] | None = None

    def watch(self) -> None:
        self._unwatch = watch(Hook(self._before))

    def unwatch(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> torch.optim.Optimizer | None:
        if self.ours or not self._concerns(optimizer):
            return None
        if within(self._concerns):  # a part of another one
            return stand_in(optimizer) if self.passes else None
        if torch._C._current_graph_task_id() != -1:
            self._warn_inside(optimizer)
            return None
        if self.meet is not None:
            self.meet(optimizer)
        goes_on = self._begins(optimizer, args[1] if len(args) > 1 else kwargs.get("closure"))
        self._since = {*(self._since or ()), id(optimizer)}
        self.count += 1
        return goes_on

    def missed(self, optimizer: torch.optim.Optimizer, changed: Callable[[], bool]) -> bool:
        """Was there no backward pass since its last step (a loss that missed the model, no rows)?

        Args:
            changed: looks at the parameters; have they come under another plan?
        """
        if self._since is None:
            changed()
            return True
        if not self._since:
            return False
        # For other parameters than before, it is a new optimizer.
        return changed() or id(optimizer) in self._since

    def round_closed(self) -> None:
        self._since = set()

    def taken_over(self, count: int) -> None:
        """This rank's state is now that after so many steps."""
        self.count, self._since = count, None

    def _warn_inside(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._warned and self._rank == 0:
            log.warning(
                "%s.step() runs inside the backward pass (a hook on parameters): gradients there are this rank's own, "
                "not yet averaged, and replicas drift apart; step after backward()",
                type(optimizer).__name__,
            )
        self._warned = True
