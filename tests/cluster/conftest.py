"""Jobs of tiny scripts that import no torch, so that each takes a tenth of a second."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster import Grace, JobResult, launch_job
from poseidon.config.schema import ClusterConfig

DEADLINE = 20.0  # seconds: far more than any of these waits takes
PRELUDE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
rank = int(os.environ["RANK"]); world = int(os.environ["WORLD_SIZE"]); here = Path(os.environ["HERE"])
def note(name, text=None):
    "Leave a file, whole at once: the test or another rank waits for it."
    tmp = here / f".{name}.{os.getpid()}"; tmp.write_text(str(os.getpid() if text is None else text))
    tmp.rename(here / name)
def wait_for(name):
    end = time.monotonic() + 20
    while not (here / name).exists():
        if time.monotonic() > end: sys.exit(f"{name} did not come")
        time.sleep(0.005)
def hang():
    threading.Event().wait(60)
"""
#: Short graces: what is tested is that each step is taken, in order.
QUICK = Grace(peers=0.6, term=0.5, interrupt=1.0, linger=0.3, hold=0.5)


def wait_until(true: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class Job:
    """Runs scripts as jobs and keeps what they showed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.lines: list[tuple[int, str, str]] = []
        self.seconds = 0.0

    def script(self, body: str) -> list[str]:
        path = self.folder / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(body))
        return [sys.executable, "-S", str(path)]

    def run(self, body: str, world_size: int = 2, **more: Any) -> JobResult:
        env = {"HERE": str(self.folder), **more.pop("env", {})}
        more.setdefault("grace", QUICK)
        more.setdefault("on_line", lambda *line: self.lines.append(line))
        start = time.monotonic()
        result = launch_job(self.script(body), ClusterConfig(), world_size, self.logs, env=env, **more)
        self.seconds = time.monotonic() - start
        return result

    def shown(self, rank: int | None = None, stream: str | None = None) -> list[str]:
        return [
            text
            for number, name, text in self.lines
            if (rank is None or number == rank) and (stream is None or name == stream)
        ]

    def log(self, rank: int) -> bytes:
        return (self.logs / f"rank{rank}.log").read_bytes()

    def noted(self, name: str) -> int:
        """The number in a file that a rank left, once it is there."""
        wait_until((self.folder / name).exists, f"a rank leaves {name}")
        return int((self.folder / name).read_text())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    yield Job(tmp_path)
    for path in tmp_path.iterdir():  # processes that a failed test left behind
        if path.is_file() and path.suffix == ".pid":
            pid = int(path.read_text())
            if alive(pid):
                os.kill(pid, 9)
