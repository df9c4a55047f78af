"""Events as Chrome trace JSON, https://github.com/catapult-project/catapult/wiki (Trace Event Format), and back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from poseidon.errors import UserError
from poseidon.tracing.tracer import Event, Row

#: In a run's folder.
FOLDER = "trace"
_ROWS = list(Row)
_MICRO = 1e6
#: Spans of a row that overlap stand on lanes of their own: viewers take what is on one lane as nested.
_LANES = 64


def rank_file(rank: int) -> str:
    return f"rank{rank}.json"


def write(file: Path, rank: int, events: Iterable[Event], about: Mapping[str, Any], dilation: float = 1.0) -> None:
    """One rank's events, undilated; the file appears whole.

    Args:
        about: what is to be known of the run; anything JSON.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    events = sorted(events, key=lambda event: event.start)
    clock = "time.monotonic() of this host, microseconds" + (f", divided by {dilation:g}" if dilation != 1 else "")
    trace = {
        "traceEvents": _entries(rank, events, dilation),
        "displayTimeUnit": "ms",
        "otherData": {"rank": rank, **about, "time_dilation": dilation, "clock": clock},
    }
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    os.replace(part, file)


def _entries(rank: int, events: Iterable[Event], dilation: float) -> list[dict[str, Any]]:
    slices: list[dict[str, Any]] = []
    lanes: dict[Row, list[float]] = {}  # by row, where each lane is free
    for event in events:
        start, end = (round(moment / dilation * _MICRO, 1) for moment in (event.start, event.end))
        free = lanes.setdefault(event.row, [])
        lane = next((number for number, since in enumerate(free) if since <= start), len(free))
        lane = min(lane, _LANES - 1)
        free[lane : lane + 1] = [end]
        slices.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": _ROWS.index(event.row) * _LANES + lane,
                "ts": start,
                "dur": round(end - start, 1),
                "cat": event.row.value,
                "name": event.name,
                "args": dict(event.details),
            }
        )
    return [*names(rank, {_ROWS.index(row) * _LANES: (row.value, len(free)) for row, free in lanes.items()}), *slices]


def names(rank: int, rows: Mapping[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """Metadata of a rank's process: by number of a row's first lane, its name and how many lanes it has."""
    told: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for first, (name, lanes) in sorted(rows.items()):
        for lane in range(lanes):
            place = {"ph": "M", "pid": rank, "tid": first + lane}
            shown = name if lane == 0 else f"{name} ({lane + 1})"
            told.append({**place, "name": "thread_name", "args": {"name": shown}})
            told.append({**place, "name": "thread_sort_index", "args": {"sort_index": first + lane}})
    return told


def read(file: Path) -> tuple[dict[str, Any], list[Event]]:
    """What is to be known of the run, and a rank's events in undilated seconds.

    Raises:
        UserError: the file is not one of ``write``.
    """
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
        return trace["otherData"], [
            Event(
                _ROWS[entry["tid"] // _LANES],
                entry["name"],
                entry["ts"] / _MICRO,
                (entry["ts"] + entry["dur"]) / _MICRO,
                entry["args"],
            )
            for entry in trace["traceEvents"]
            if entry["ph"] == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{file}: is no trace of a rank ({type(error).__name__}: {error})") from error
