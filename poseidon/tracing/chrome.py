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
        "traceEvents": [*_names(rank, {event.row for event in events}), *(_slice(rank, e, dilation) for e in events)],
        "displayTimeUnit": "ms",
        "otherData": {"rank": rank, **about, "time_dilation": dilation, "clock": clock},
    }
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    os.replace(part, file)


def _names(rank: int, rows: set[Row]) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for number, row in enumerate(_ROWS):
        if row in rows:
            place = {"ph": "M", "pid": rank, "tid": number}
            named.append({**place, "name": "thread_name", "args": {"name": row.value}})
            named.append({**place, "name": "thread_sort_index", "args": {"sort_index": number}})
    return named


def _slice(rank: int, event: Event, dilation: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": _ROWS.index(event.row),
        "ts": round(event.start / dilation * _MICRO, 1),
        "dur": round((event.end - event.start) / dilation * _MICRO, 1),
        "cat": event.row.value,
        "name": event.name,
        "args": dict(event.details),
    }


def read(file: Path) -> tuple[dict[str, Any], list[Event]]:
    """What is to be known of the run, and a rank's events in undilated seconds.

    Raises:
        UserError: the file is not one of ``write``.
    """
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
        return trace["otherData"], [
            Event(
                _ROWS[entry["tid"]],
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
