"""Simulated time: events in their order, and stations that work on one job after the other. For predictions of any
kind: of a plan (``timeline``), of a cluster (``poseidon.simulation``)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

Then = Callable[[], None]
#: Of jobs that wait at a station the one with the smallest goes first; of equal ones the first to come.
Priority = tuple[int, ...]


class Clock:
    """Calls things at their time: in order of time, then of setting."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()


class Station:
    """Serves one job at a time: a device, a copy engine, a CPU, a link's way out.

    Args:
        piece: seconds after which a job makes way for a more urgent one; by default none is interrupted.

    Attributes:
        busy: (start, end) of each job, or piece of one, so far, in their order; no two overlap.
    """

    def __init__(self, clock: Clock, piece: float = math.inf) -> None:
        self._clock, self._piece = clock, piece
        self._waiting: list[tuple[Priority, int, float, Then]] = []
        self._numbers = itertools.count()
        self._working = False
        self.busy: list[tuple[float, float]] = []

    def do(self, seconds: float, then: Then, priority: Priority = ()) -> None:
        """Queue a job; `then` runs at its end. One that takes no time does not queue."""
        if not seconds:
            self._clock.after(0.0, then)
            return
        heapq.heappush(self._waiting, (priority, next(self._numbers), seconds, then))
        if not self._working:
            self._begin()

    def _begin(self) -> None:
        if not self._waiting:
            return
        priority, number, seconds, then = heapq.heappop(self._waiting)
        part = min(seconds, self._piece)
        self._working = True
        self.busy.append((self._clock.now, self._clock.now + part))
        self._clock.after(part, lambda: self._end((priority, number, seconds - part, then)))

    def _end(self, job: tuple[Priority, int, float, Then]) -> None:
        if job[2] > 0:
            heapq.heappush(self._waiting, job)
        else:
            job[3]()  # while nothing else can begin: what follows from a job may be the next one
        self._working = False
        self._begin()


class Together:
    """Calls once, when it has been called so often."""

    def __init__(self, count: int, then: Then) -> None:
        self._missing, self._then = count, then
        if not count:
            then()

    def __call__(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._then()
