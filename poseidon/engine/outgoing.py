"""What one round sends: each unit as soon as its gradients are final."""

from __future__ import annotations

import time

from poseidon.engine.forwards import StepRows
from poseidon.engine.plan import Plan
from poseidon.planning import FactorSize, Unit


class Outgoing:
    """One round of this rank.

    Attributes:
        final: parameters whose gradients are.
        factor_sizes: of those that factors alone make up, by name.
        seconds: of the backward pass until each gradient was final after the one before it, by name.
    """

    def __init__(self, plan: Plan, round_: int, step_rows: StepRows) -> None:
        self._plan, self._round, self._step_rows = plan, round_, step_rows
        self.final: set[int] = set()
        self.factor_sizes: dict[str, FactorSize] = {}
        self.seconds: dict[str, float] = {}
        self._moment = time.perf_counter()
        self._missing = [len(unit.params) for unit in plan.book.units]
        self._ready: list[Unit] = []  # final, but not sent

    def begin(self) -> None:
        """The backward pass begins."""
        self._moment = time.perf_counter()

    def finalize(self, index: int) -> bool:
        """A parameter's gradient is final.

        Returns:
            Whether its whole unit is.

        Raises:
            UserError: it cannot be averaged.
        """
        book = self._plan.book
        self.final.add(index)
        before, self._moment = self._moment, time.perf_counter()
        self.seconds[book.params[index].name] = self._moment - before
        size = self._plan.gradients.settle(index)
        if size is not None:
            self.factor_sizes[book.params[index].name] = size
        unit = book.units[book.unit_of[index]]
        self._missing[unit.index] -= 1
        if self._missing[unit.index]:
            return False
        self._ready.append(unit)
        return True

    def send(self, steps: int, *, absent: bool) -> None:
        """What is final leaves.

        Args:
            steps: that this rank's optimizers have begun.
            absent: this rank only goes along.
        """
        ready, self._ready = self._ready, []
        gradients, syncers = self._plan.gradients, self._plan.syncers
        for unit in ready:
            rows = self._step_rows.settle(gradients.found, absent=absent)
            contribution = gradients.contribution(unit, self._round, rows)
            syncers.contribute(self._round, steps, unit.index, contribution)
