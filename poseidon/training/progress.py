"""Progress of a run: rank 0 says it in marked lines, the process that launched the ranks shows it.

Rank 0 has no terminal (its output is a pipe into the launcher and a file), so it prints one JSON object
per line behind :data:`MARK`; :class:`Display` turns those into a live line on a terminal, and into plain
lines, now and then, elsewhere.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from poseidon.cluster.base import LAUNCHER
from poseidon.cluster.screen import print_line

MARK = "@poseidon "


def emit(record: dict[str, Any]) -> None:
    """In a rank: says how far it is."""
    print(MARK + json.dumps(record), flush=True)


def parse(line: str) -> dict[str, Any] | None:
    """The record in a marked line, else None."""
    if not line.startswith(MARK):
        return None
    try:
        record = json.loads(line[len(MARK) :])
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Display:
    """Shows the lines of all ranks in the launching process.

    Args:
        console: where to; default stdout.
        interval: seconds between plain progress lines where stdout is no terminal.
    """

    def __init__(self, console: Console | None = None, interval: float = 10.0) -> None:
        self.console = console or Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self.last: dict[str, Any] = {}  # newest values of all progress records
        self._interval = interval
        self._shown = float("-inf")
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def on_line(self, rank: int, stream: str, text: str) -> None:
        """One line of a rank's (or the launcher's) output: a :data:`poseidon.cluster.base.OnLine`."""
        record = parse(text) if rank == 0 and stream == "stdout" else None
        if record is not None:
            self._progress(record)
        elif self._bar is not None:
            self._print(text if rank == LAUNCHER else f"[rank {rank}] {text}")
        else:
            print_line(rank, stream, text)

    def close(self) -> None:
        """Takes the live line off the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _progress(self, record: dict[str, Any]) -> None:
        self.last.update(record)
        if "eval_accuracy" in record:
            self._print(describe_evaluation(record))
        elif self.console.is_terminal:
            self._live(record)
        elif time.monotonic() - self._shown >= self._interval or record["iteration"] == record["total"]:
            self._shown = time.monotonic()
            self._print(f"iteration {record['iteration']}/{record['total']}  {describe(record)}")

    def _live(self, record: dict[str, Any]) -> None:
        if self._bar is None:
            self._bar = Progress(
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=record["total"])
        self._bar.update(self._task, completed=record["iteration"], description=_figures(record))

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


def describe(record: dict[str, Any]) -> str:
    """A progress record in words: ``epoch 1.2  loss 0.31  840 images/s  12.0 MB/s  stall 8%``."""
    return f"epoch {record['epoch']:.1f}  {_figures(record)}"


def _figures(record: dict[str, Any]) -> str:
    parts = []
    if record.get("train_loss") is not None:
        parts.append(f"loss {record['train_loss']:.4g}")
    if record.get("images_per_second") is not None:
        parts.append(f"{record['images_per_second']:,.0f} images/s")
    if record.get("mb_per_second"):  # neither unknown (ddp, fsdp) nor nothing (single)
        parts.append(f"{record['mb_per_second']:.1f} MB/s")
        parts.append(f"stall {record['stall_share']:.0%}")
    return "  ".join(parts)


def describe_evaluation(record: dict[str, Any]) -> str:
    loss = record.get("train_loss")
    return (
        f"epoch {record['epoch']:.4g}  evaluation: accuracy {record['eval_accuracy']:.2%}, "
        f"loss {record['eval_loss']:.4g}" + (f"; training loss {loss:.4g}" if loss is not None else "")
    )
