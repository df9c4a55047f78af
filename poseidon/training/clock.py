"""Times of iterations, from end of step to end of step."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from poseidon.training.load import Load


class IterationClock:
    """Collects wall and CPU seconds per iteration of this process.

    The first iterations (which warm everything up; the rows of the very first decide the plan) are left out; so is
    what happens within :meth:`paused` (evaluation, checkpoints). CPU seconds are those of all threads of this
    process, the engine's included, but not of data-loading workers. On CUDA the host's view is timed:
    kernels may still run when a step has been issued.

    Args:
        warmup: iterations to leave out, at least 1.
        stalled: seconds that this rank has waited for communication so far.
        dilation: of the times of an emulated run (``cluster.time_dilation``): wall seconds are told divided by it, CPU
            seconds, which are not dilated, as they are.
    """

    def __init__(self, dilation: float = 1.0, warmup: int = 1, stalled: Callable[[], float] = float) -> None:
        self.dilation = dilation
        self._warmup, self._stalled = warmup, stalled
        self._stall = 0.0
        self.load = Load()
        self.seconds = array("d")
        self.cpu_seconds = 0.0
        self.drain_seconds = 0.0
        self._last: tuple[float, float] | None = None
        self._out = (0.0, 0.0)  # spent while paused

    def now(self) -> float:
        """Seconds on a clock that stands still while paused."""
        return (time.perf_counter() - self._out[0]) / self.dilation

    def tick(self) -> None:
        """A step has ended."""
        self._warmup -= 1
        if self._warmup > 0:
            return
        if self._last is None:
            self.load.begin()
            self._stall = -self._stalled()
            self._last = self._moment()
        else:
            self.seconds.append(self._passed())

    def end(self) -> None:
        """What the last step left to do is done. Its time is in totals, but in no iteration."""
        if self._last is not None:
            self.drain_seconds = self._passed()
            self._stall += self._stalled()
        self.load.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._out = (
            self._out[0] + time.perf_counter() - wall,
            self._out[1] + time.process_time() - cpu,
        )

    def _moment(self) -> tuple[float, float]:
        return self.now(), time.process_time() - self._out[1]

    def _passed(self) -> float:
        """Wall seconds since this was last asked, whose CPU seconds are added up."""
        assert self._last is not None
        last, self._last = self._last, self._moment()
        self.cpu_seconds += self._last[1] - last[1]
        return self._last[0] - last[0]

    @property
    def spread(self) -> dict[str, float] | None:
        """Of the iterations: mean (the last one's rest shared out among all), median, percentiles and maximum."""
        found = spread(self.seconds)
        if found is not None:
            found["mean"] += self.drain_seconds / len(self.seconds)
        return found

    @property
    def cpu_seconds_per_iteration(self) -> float | None:
        return self.cpu_seconds / len(self.seconds) if self.seconds else None

    @property
    def stall_seconds_per_iteration(self) -> float | None:
        return self._stall / self.dilation / len(self.seconds) if self.seconds else None

    @property
    def busiest_thread_seconds_per_iteration(self) -> float | None:
        """CPU seconds of the busiest thread other than the training's own: of the engine, ZeroMQ or gloo."""
        return self.load.busiest / len(self.seconds) if self.load.busiest is not None and self.seconds else None


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 10th and 90th percentile (linear interpolation) and maximum, or None without values."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return dict.fromkeys(("mean", "median", "p10", "p90", "max"), seconds[0])
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "mean": statistics.fmean(seconds),
        "median": statistics.median(seconds),
        "p10": tenths[0],
        "p90": tenths[8],
        "max": max(seconds),
    }
