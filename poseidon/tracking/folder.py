"""A run's folder, and files in it that are either whole or not there."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

from poseidon.errors import UserError

#: What lies in it.
LOGS, SUMMARY, METRICS, PLAN, FIGURES = "logs", "summary.json", "metrics.jsonl", "plan.json", "figures"
CONFIG, OVERRIDES, SPEC = "config.yaml", "overrides.yaml", "spec.json"


def create_run_dir(wanted: Path) -> Path:
    """Makes a run's folder, which no other run has: ``wanted``, or ``wanted-1``, ``wanted-2`` ... if taken.

    A folder is taken by making ``logs`` in it, which succeeds once only. So it may exist already (somebody
    asked for it, or another tool made it), and of two runs started in the same second each gets its own.

    Raises:
        UserError: the folder cannot be made.
    """
    for number in itertools.count():
        candidate = wanted if number == 0 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            (candidate / LOGS).mkdir()
        except FileExistsError:
            if not candidate.is_dir():
                raise UserError(f"hydra.run.dir: {candidate} is a file") from None
        except OSError as error:
            raise UserError(f"hydra.run.dir: cannot make {candidate}: {error.strerror}") from error
        else:
            return candidate.absolute()
    raise AssertionError("unreachable")


def write_text(path: Path, text: str) -> None:
    """Replaces the file in one go: readers see the old content or the new, never a part."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_json(path: Path, content: Any) -> None:
    """As :func:`write_text`. NaN and infinities, which JSON has not, become null."""
    write_text(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any | None:
    """The content, or None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
