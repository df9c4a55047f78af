"""What a run's engine and this machine were busy with: was software the limit of a figure? Linux."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")


class Load:
    """CPU time of this process's threads and of the whole machine, between :meth:`begin` and :meth:`end`."""

    def __init__(self) -> None:
        self._threads: dict[int, float] | None = None
        self._machine: tuple[float, float] | None = None
        self._main = threading.get_native_id()
        self.busiest: float | None = None
        self.busy_share: float | None = None

    def begin(self) -> None:
        self._threads, self._machine = _thread_seconds(), _machine_seconds()

    def end(self) -> None:
        """Sets ``busiest``, CPU seconds of the busiest thread other than the training's own, and ``busy_share``, the
        part of all cores' time that was not idle, whoever used it. None where there is no /proc."""
        if self._threads is not None:
            spent = {
                thread: seconds - self._threads.get(thread, 0.0)
                for thread, seconds in _thread_seconds().items()
                if thread != self._main
            }
            self.busiest = max(spent.values(), default=0.0)
        now = _machine_seconds()
        if self._machine is not None and now is not None and now[1] > self._machine[1]:
            self.busy_share = (now[0] - self._machine[0]) / (now[1] - self._machine[1])


def _thread_seconds() -> dict[int, float]:
    found = {}
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def _machine_seconds() -> tuple[float, float] | None:
    """(busy, all) of all cores; waiting for a disk is idle."""
    try:
        ticks = [int(text) for text in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / second, sum(ticks) / second
