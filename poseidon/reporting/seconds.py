"""Seconds per iteration of emulated clusters beside those that the papers published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from poseidon.reporting.emulated import papers_choice
from poseidon.reporting.published import Curve
from poseidon.reporting.sections import Configuration, Section

#: Why a cell tests nothing.
GIVEN = "the profile's own figure"
FITTED = "the profile's host_copy and server_sum were fitted to it"


def rows(section: Section, published: Sequence[Curve]) -> list[dict[str, Any]]:
    """The tidy data of the table: a row per published cell that has been run, first one machine's.

    Args:
        published: curves of the section's model and links; only those of its hardware are taken.
    """
    curves = [curve for curve in published if curve.seconds and curve.profile == section.first.summary.get("hardware")]
    return [*_one_machine(section, curves), *(row for curve in curves for row in _curve(section, curve))]


def _one_machine(section: Section, curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    published = {curve.baseline_seconds: curve for curve in curves}
    for configuration in section.configurations:
        if configuration.comm == "single" and configuration.rows == section.batch_size:
            for seconds, curve in published.items():
                if seconds is not None:
                    yield from _row(configuration, curve, f"{curve.paper} one machine", seconds, GIVEN)


def _curve(section: Section, curve: Curve) -> Iterator[dict[str, Any]]:
    for configuration in section.configurations:
        seconds = curve.seconds.get(configuration.nodes)
        if seconds is not None and papers_choice(configuration.runs[0]) == curve.comm:
            why = FITTED if configuration.nodes in curve.fitted else None
            yield from _row(configuration, curve, f"{curve.paper} {curve.system}", seconds, why)


def _row(c: Configuration, curve: Curve, theirs: str, seconds: float, why: str | None) -> Iterator[dict[str, Any]]:
    if c.seconds is None:
        return
    yield {
        "published": theirs,
        "curve": c.variant,
        "nodes": c.nodes,
        "seconds": c.seconds.median,
        "seconds_min": c.seconds.low,
        "seconds_max": c.seconds.high,
        "published_seconds": seconds,
        "ratio": c.seconds.median / seconds,
        "repeats": c.seconds.count,
        "source": curve.word,
        "no_test": why,
        "limits": ", ".join(c.bounds),
        "time_dilation": c.dilation,
        "degree": c.runs[0].text("degree"),
    }
