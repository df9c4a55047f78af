"""Curves of loss and accuracy: repeats joined, and cut down to what a figure can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.reporting.runs import Run, stat
from poseidon.reporting.sections import Configuration, Section

#: Points of a drawn curve; longer ones are means over neighbours.
MOST_POINTS = 100


@dataclass(frozen=True)
class Point:
    """Of a curve: median, smallest and largest over the repeats.

    Attributes:
        seconds: median wall time since the first iteration; None if it is not known.
    """

    iteration: int
    seconds: float | None
    median: float
    low: float
    high: float
    repeats: int


def joined(runs: Sequence[Run], metric: str) -> list[Point]:
    """The curve of repeats: at each iteration over those runs that have a value there.

    Args:
        metric: such as ``eval/accuracy``; its times are in ``eval/wall_s``.
    """
    clock = f"{metric.partition('/')[0]}/wall_s"
    values = [dict(run.histories.get(metric, ())) for run in runs]
    times = [dict(run.histories.get(clock, ())) for run in runs]
    found = []
    for iteration in sorted({iteration for history in values for iteration in history}):
        here = stat(history.get(iteration) for history in values)
        seconds = stat(history.get(iteration) for history in times)
        if here is not None:
            when = seconds.median if seconds else None
            found.append(Point(iteration, when, here.median, here.low, here.high, here.count))
    return _thinned(found)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Means over equally many neighbours, at the place of the last of them."""
    size = -(-len(points) // MOST_POINTS) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        Point(
            iteration=part[-1].iteration,
            seconds=part[-1].seconds,
            median=sum(point.median for point in part) / len(part),
            low=sum(point.low for point in part) / len(part),
            high=sum(point.high for point in part) / len(part),
            repeats=part[-1].repeats,
        )
        for part in parts
    ]


def panels(section: Section) -> dict[int, list[Configuration]]:
    """What is compared at each number of nodes. One process is in every panel: with as many rows as all nodes
    together if there is such a run, else with those of one node."""
    several = [c for c in section.configurations if c.comm != "single"]
    single = [c for c in section.configurations if c.comm == "single"]
    found = {}
    for nodes in sorted({c.nodes for c in several}) or [1]:
        equal = [c for c in single if c.rows == nodes * section.batch_size]
        one = equal or [c for c in single if c.rows == section.batch_size]
        found[nodes] = [*one, *(c for c in several if c.nodes == nodes)]
    return {nodes: configurations for nodes, configurations in found.items() if configurations}


def rows(section: Section, metric: str, name: str) -> list[dict[str, Any]]:
    """The tidy data of a figure: a row per point of each curve."""
    return [
        {
            "curve": configuration.variant,
            "comm": configuration.comm,
            "nodes": configuration.nodes,
            "rows_per_iteration": configuration.rows,
            "iteration": point.iteration,
            "seconds": point.seconds,
            name: point.median,
            f"{name}_min": point.low,
            f"{name}_max": point.high,
            "repeats": point.repeats,
            "degree": section.facts["degree"],
        }
        for configuration in section.configurations
        for point in joined(configuration.runs, metric)
    ]
