"""Traces of a run's ranks, put together: which message was on the wire when, one file for viewers, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.errors import UserError
from poseidon.reporting.figures.canvas import save, style
from poseidon.reporting.figures.timeline import draw
from poseidon.reporting.transfers import Transfer, transfers
from poseidon.tracing import FOLDER, Event, Row, names, read

#: Of all ranks, beside their own files.
MERGED, PICTURE = "all.json", "timeline.png"
#: Numbers of the merged file's rows for links, below all others.
_LINKS = 10_000
_MICRO = 1e6


@dataclass(frozen=True)
class TracedRun:
    """Attributes: about: what rank 0's file says of the run. ranks: events of each, seconds from the first one's."""

    folder: Path
    about: Mapping[str, Any]
    ranks: Mapping[int, list[Event]]

    @property
    def iterations(self) -> list[Event]:
        """Of rank 0."""
        return [event for event in self.ranks[0] if event.row is Row.iteration]


def load(folder: Path) -> TracedRun:
    """The traces in a run's folder.

    Raises:
        UserError: there are none, or not of rank 0.
    """
    found = [read(file) for file in sorted((folder / FOLDER).glob("rank*.json"))]
    ranks = {int(about["rank"]): events for about, events in found}
    if 0 not in ranks:
        raise UserError(
            f"{folder}: has no {FOLDER}/rank0.json: is it a run's folder? A run writes it with trainer.trace=[6] (its "
            f"sixth iteration, or others), when it is over"
        )
    first = min(event.start for events in ranks.values() for event in events)
    shifted = {rank: [_shifted(event, first) for event in events] for rank, events in ranks.items()}
    return TracedRun(folder, next(about for about, _ in found if about["rank"] == 0), shifted)


def _shifted(event: Event, first: float) -> Event:
    return Event(event.row, event.name, event.start - first, event.end - first, event.details)


def merge(run: TracedRun) -> Path:
    """Writes one file of all ranks, for viewers: their spans, links as far as they are known, and arrows from each
    message's sending to its coming."""
    entries: list[dict[str, Any]] = []
    for rank in run.ranks:
        entries += json.loads((run.folder / FOLDER / f"rank{rank}.json").read_text(encoding="utf-8"))["traceEvents"]
    first = min(entry["ts"] for entry in entries if entry["ph"] == "X")
    for entry in entries:
        if entry["ph"] == "X":
            entry["ts"] = round(entry["ts"] - first, 1)
    found = transfers(run.ranks)
    entries += _links(found)
    places = {(entry["pid"], entry["cat"], entry["args"].get("message")): entry for entry in entries if "cat" in entry}
    for number, transfer in enumerate(found):
        ends = ((transfer.sender, Row.send, "s"), (transfer.receiver, Row.receive, "f"))
        for rank, row, phase in ends:
            slice_ = places.get((rank, row.value, transfer.message))
            if slice_ is not None:
                arrow = {"ph": phase, "id": number, "cat": "message", "name": "message", "bp": "e"}
                entries.append({**arrow, **{key: slice_[key] for key in ("pid", "tid", "ts")}})
    file = run.folder / FOLDER / MERGED
    file.write_text(
        json.dumps({"traceEvents": entries, "displayTimeUnit": "ms", "otherData": run.about}, separators=(",", ":")),
        encoding="utf-8",
    )
    return file


def _links(found: Sequence[Transfer]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for sender, receiver in sorted({(transfer.sender, transfer.receiver) for transfer in found}):
        entries += names(sender, {_LINKS + receiver: (f"link to rank {receiver}", 1)})[2:]
    for transfer in found:
        entries.append(
            {
                "ph": "X",
                "pid": transfer.sender,
                "tid": _LINKS + transfer.receiver,
                "ts": round(transfer.start * _MICRO, 1),
                "dur": round((transfer.end - transfer.start) * _MICRO, 1),
                "cat": "link",
                "name": transfer.event.name,
                "args": dict(transfer.event.details),
            }
        )
    return entries


def picture(runs: Sequence[TracedRun], ranks: Sequence[int], file: Path) -> Path:
    """Draws these ranks of each run, all on one scale; PNG or SVG, as the file's name says.

    Raises:
        UserError: no such rank; another kind of file.
    """
    for run in runs:
        for rank in ranks:
            if rank not in run.ranks:
                raise UserError(f"ranks={rank}: {run.folder} has traces of ranks {', '.join(map(str, run.ranks))}")
    if file.suffix not in (".png", ".svg"):
        raise UserError(f"output={file}: must end with .png or .svg")
    file.parent.mkdir(parents=True, exist_ok=True)
    with style():
        save(draw(runs, ranks), file.with_suffix(""), [file.suffix])
    return file


def draw_folders(folders: Sequence[Path], ranks: Sequence[int], output: str | None) -> list[Path]:
    """``poseidon trace``: merges each run's traces, draws them together, and tells the files.

    Raises:
        UserError: as ``load`` and ``picture``.
    """
    runs = [load(folder) for folder in folders]
    file = folders[0] / FOLDER / PICTURE if output is None else Path(output)
    drawn = picture(runs, ranks, file)
    return [*(merge(run) for run in runs), drawn]
