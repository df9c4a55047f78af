"""What each run of a benchmark came to: a line of ``raw.jsonl`` per run, added as soon as it has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from poseidon.errors import UserError
from poseidon.reporting.runs import COMPLETED, largest, number
from poseidon.tracking.folder import finite, write_text

#: The rounds of a case count from 1; runs that only choose among a variant's alternatives are of this one.
CHOICE = 0


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        variants: that it stands for; several whose configs are the same.
        digest: of its whole config: runs with the same one are repeats.
        round: which of the pairs, or CHOICE.
        chosen: by variant, what it has that the variant's other alternatives have not.
        command: makes the same run by hand.
        seconds: that the whole run took, on the wall.
        busy: what the busiest node's parts work per undilated iteration: ``device``, ``link`` ...; {} if unknown.
        summary: of ``summary.json``, see docs/records.md.
    """

    case: str
    variants: Sequence[str]
    digest: str
    round: int
    chosen: Mapping[str, str]
    command: str
    seconds: float
    busy: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        return self.summary.get("status") == COMPLETED and self.iteration is not None

    @property
    def error(self) -> str:
        if self.summary.get("status") == COMPLETED:
            return "no iteration was timed"
        return str(self.summary.get("error") or self.summary.get("status") or "no reason recorded")

    def value(self, key: str) -> float | None:
        return number(self.summary.get(key))

    def of_iterations(self, key: str) -> float | None:
        """``median``, ``mean``, ``max`` ... seconds of the timed iterations."""
        told = self.summary.get("iteration_seconds")
        return number(told.get(key)) if isinstance(told, Mapping) else None

    @property
    def iteration(self) -> float | None:
        """Median seconds."""
        return self.of_iterations("median")

    @property
    def bound(self) -> float | None:
        """max(the device's work, reconstruction included; bytes across one node's link / nominal rate). None where
        either is this machine's own, or its links have no limit."""
        if "device" not in self.busy or ("link" not in self.busy and self.value("nodes") != 1):
            return None
        return max(self.busy["device"], self.busy.get("link", 0.0)) or None

    @property
    def sent(self) -> float | None:
        """Bytes per iteration, of the node that sends most."""
        return largest(self.summary.get("bytes_sent_per_iteration"))

    @property
    def thread(self) -> float | None:
        """CPU seconds per iteration of the busiest engine thread."""
        return largest(self.summary.get("busiest_thread_seconds_per_iteration"))


class Store:
    """The records of a folder, old ones first.

    Raises:
        UserError: the file is there and is not one of these, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "raw.jsonl"
        self.records: list[Record] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        except OSError as error:
            raise UserError(f"bench.folder: cannot use {error.filename or folder}: {error.strerror}") from error
        for place, line in enumerate(lines, 1):
            try:
                self.records.append(Record(**json.loads(line)))
            except (ValueError, TypeError) as error:
                if place < len(lines):
                    raise UserError(f"{self._path}:{place}: is no record of poseidon bench; move it away") from error
                self.forget(set())  # its writing was cut off

    def add(self, record: Record) -> None:
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def forget(self, cases: set[str]) -> None:
        """All records of these cases."""
        self.records = [record for record in self.records if record.case not in cases]
        write_text(self._path, "".join(map(_line, self.records)))

    def completed(self, case: str, digest: str) -> dict[int, Record]:
        """By round; of several in one round the newest."""
        return {r.round: r for r in self.records if r.case == case and r.digest == digest and r.completed}

    def newest(self, case: str, variant: str) -> str | None:
        """Digest of the newest run that counts for a variant."""
        found = (r for r in reversed(self.records) if r.case == case and variant in r.variants and r.round != CHOICE)
        return next((record.digest for record in found if record.completed), None)


def _line(record: Record) -> str:
    return json.dumps(finite(asdict(record)), allow_nan=False) + "\n"
