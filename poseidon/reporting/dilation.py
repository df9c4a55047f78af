"""Time dilation: which factor the curves are of, and how much of an iteration is this machine's software.

A run at f takes the wall time W(f) = f A + B per iteration: A is dilated (layers, links), B is not (interpreter,
ZeroMQ, gloo, the kernel). Records hold T(f) = W(f) / f = A + B/f, so that T(f) and T(2f) tell both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poseidon.reporting.runs import Stat

if TYPE_CHECKING:
    from poseidon.reporting.sections import Configuration, Section

#: How far T(1) may lie from A + B.
BAR = 0.05


@dataclass(frozen=True)
class Pair:
    """A cell that was run at f and at 2f; seconds per iteration, undilated.

    Attributes:
        once: T(f).
        twice: T(2f).
        alone: T(1), if it was measured and is not one of the two.
        bounds: what of this machine's was the limit, such as ``CPU at f = 8``.
    """

    curve: str
    nodes: int
    rows: int
    factor: float
    once: Stat
    twice: Stat
    alone: Stat | None
    bounds: tuple[str, ...]

    @property
    def dilated(self) -> float:
        """A: of the emulated cluster alone."""
        return 2 * self.twice.median - self.once.median

    @property
    def software(self) -> float:
        """B: of this machine's CPU, in one iteration."""
        return self.factor * (self.once.median - self.dilated)

    @property
    def here(self) -> float:
        """A + B: what it would take at f = 1."""
        return self.dilated + self.software

    @property
    def difference(self) -> float | None:
        """Of T(1) from A + B, as a part of A + B."""
        return self.alone.median / self.here - 1 if self.alone and self.here > 0 else None


def chosen(cells: Iterable[tuple[str, float]]) -> float:
    """The f of most cells, given as (comm, f); of equals the smallest. What one process does is no curve."""
    counts: dict[float, tuple[int, int]] = {}
    for comm, factor in cells:
        several, all_of_them = counts.get(factor, (0, 0))
        counts[factor] = (several + (comm != "single"), all_of_them + 1)
    return max(counts, key=lambda factor: (counts[factor], -factor))


def pairs(section: Section) -> list[Pair]:
    """Of every cell, for every f at which it was also run at 2f, in the order of the curves."""
    found = []
    for cell in cells(section):
        timed = {c.dilation: c for c in cell if c.seconds}
        for factor, once in sorted(timed.items()):
            twice = next((c for f, c in timed.items() if math.isclose(f, 2 * factor)), None)
            if twice is not None:
                found.append(_pair(once, twice, timed.get(1.0)))
    return found


def cells(section: Section) -> list[list[Configuration]]:
    """Configurations that differ in f alone, beside each other."""
    found: dict[tuple[str, int, int], list[Configuration]] = {}
    for c in (*section.configurations, *section.elsewhere):
        found.setdefault((c.variant, c.nodes, c.rows), []).append(c)
    return list(found.values())


def apart(section: Section) -> list[Configuration]:
    """Cells that are in no curve, as they were not run at the curves' f."""
    return [c for cell in cells(section) if all(c.dilation != section.dilation for c in cell) for c in cell]


def rows(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """The tidy data of the table."""
    return [
        {
            "curve": pair.curve,
            "nodes": pair.nodes,
            "rows_per_iteration": pair.rows,
            "f": pair.factor,
            "seconds_at_f": pair.once.median,
            "seconds_at_2f": pair.twice.median,
            "repeats_at_f": pair.once.count,
            "repeats_at_2f": pair.twice.count,
            "dilated_seconds": pair.dilated,
            "software_seconds": pair.software,
            "undilated_seconds": pair.here,
            "seconds_at_1": pair.alone.median if pair.alone else None,
            "difference": pair.difference,
            "within_bar": None if pair.difference is None else abs(pair.difference) <= BAR,
            "limits": "; ".join(pair.bounds),
        }
        for pair in found
    ]


def _pair(once: Configuration, twice: Configuration, alone: Configuration | None) -> Pair:
    assert once.seconds
    assert twice.seconds
    if alone is once:  # A + B is T(1) then, whatever was measured: no test of anything
        alone = None
    measured = [c for c in (alone, once, twice) if c is not None]
    return Pair(
        curve=once.variant,
        nodes=once.nodes,
        rows=once.rows,
        factor=once.dilation,
        once=once.seconds,
        twice=twice.seconds,
        alone=alone.seconds if alone else None,
        bounds=tuple(f"{bound} at f = {c.dilation:g}" for c in measured for bound in c.bounds),
    )
