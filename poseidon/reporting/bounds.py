"""What each part of an emulated cluster has to do in an iteration, and how much longer the iteration is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poseidon.reporting.emulated import link_seconds
from poseidon.reporting.runs import Run, Stat, number, stat
from poseidon.reporting.sections import Configuration, Section

#: Parts of a node, and what people call them.
PARTS = {"device": "device", "link": "link", "host_copy": "copies", "server_sum": "sums"}


def rows(section: Section) -> list[dict[str, Any]]:
    """The tidy data of the table: a row per configuration whose runs tell how long their parts worked."""
    return [row for configuration in section.configurations if (row := _row(configuration))]


def busy_seconds(run: Run) -> dict[str, float]:
    """Per iteration, undilated, of the node where it is most, by part; {} if the record does not tell."""
    told = run.summary.get("emulated_busy_seconds")
    if not isinstance(told, Mapping):
        return {}
    found = {part: link_seconds(run) if part == "link" else number(told.get(part)) for part in PARTS}
    return {part: seconds for part, seconds in found.items() if seconds is not None}


def _row(configuration: Configuration) -> dict[str, Any] | None:
    told = [busy_seconds(run) for run in configuration.runs]
    parts = {part: found.median for part in PARTS if (found := _of(told, part))}
    if not parts or configuration.seconds is None or not max(parts.values()):
        return None
    busiest = max(parts, key=lambda part: parts[part])
    return {
        "curve": configuration.variant,
        "nodes": configuration.nodes,
        "seconds": configuration.seconds.median,
        **{f"{part}_seconds": parts.get(part) for part in PARTS},
        "busiest": busiest,
        "over_busiest": configuration.seconds.median / parts[busiest],
        "time_dilation": configuration.dilation,
    }


def _of(told: list[dict[str, float]], part: str) -> Stat | None:
    return stat(seconds.get(part) for seconds in told)
