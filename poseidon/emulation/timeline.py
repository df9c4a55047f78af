"""Things that are busy for a while, one job after the other, and alarms at the end of what nobody sleeps through."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

#: What a sleep may end late by, on an idle machine, is more than this; waiting for less is not worth one.
SHORTEST_SLEEP = 20e-6


class Timeline:
    """A queue of jobs on one piece of hardware. Times are seconds of ``time.monotonic()``; not thread-safe.

    Attributes:
        busy: seconds of all jobs so far.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._free = 0.0
        self.busy = 0.0

    def ready(self) -> None:
        """What comes next cannot begin before now: it depends on something that has just happened."""
        self._free = max(self._free, self._now())

    def reserve(self, seconds: float, what: str = "", layer: str = "") -> float:
        """Queue a job; the time at which it ends. What it does, and for which layer, is for who records it.

        Jobs in a row begin where the one before ended, even if that is past: who queues them may be late (an
        interpreter is), the hardware is not.
        """
        self._free += seconds
        self.busy += seconds
        return self._free


def sleep_until(when: float) -> None:
    """To an absolute time, so that being late once is not being late from then on."""
    left = when - time.monotonic()
    if left > SHORTEST_SLEEP:
        time.sleep(left)


class Alarms:
    """Runs calls at given times, in one thread: in order of time, then of setting."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Run `call` at `when` (``time.monotonic()``); from any thread."""
        with self._changed:
            heapq.heappush(self._heap, (when, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="poseidon-alarms", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._heap:
                    self._changed.wait()
                left = self._heap[0][0] - time.monotonic()
                if left > SHORTEST_SLEEP:
                    self._changed.wait(left)
                    continue
                _, _, call = heapq.heappop(self._heap)
            call()
