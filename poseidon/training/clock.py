"""Times of iterations, from end of step to end of step."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from poseidon.training.load import Load


class IterationClock:
    """Collects wall and CPU seconds per iteration of this process.

    The first iteration (which warms everything up, and whose rows decide the plan) is left out; so is what
    happens within :meth:`paused` (evaluation, checkpoints). CPU seconds are those of all threads of this
    process, the engine's included, but not of data-loading workers. On CUDA the host's view is timed:
    kernels may still run when a step has been issued.

    Args:
        dilation: of the times of an emulated run (``cluster.time_dilation``): wall seconds are told divided by it, CPU
            seconds, which are not dilated, as they are.
    """

    def __init__(self, dilation: float = 1.0) -> None:
        self.dilation = dilation
        self.load = Load()
        self.seconds = array("d")
        self.cpu_seconds = 0.0
        self._last: tuple[float, float] | None = None
        self._out = (0.0, 0.0)  # spent while paused

    def now(self) -> float:
        """Seconds on a clock that stands still while paused."""
        return (time.perf_counter() - self._out[0]) / self.dilation

    def tick(self) -> None:
        """A step has ended."""
        now = (self.now(), time.process_time() - self._out[1])
        if self._last is not None:
            self.seconds.append(now[0] - self._last[0])
            self.cpu_seconds += now[1] - self._last[1]
        else:
            self.load.begin()
        self._last = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._out = (
            self._out[0] + time.perf_counter() - wall,
            self._out[1] + time.process_time() - cpu,
        )

    @property
    def cpu_seconds_per_iteration(self) -> float | None:
        return self.cpu_seconds / len(self.seconds) if self.seconds else None

    @property
    def busiest_thread_seconds_per_iteration(self) -> float | None:
        """CPU seconds of the busiest thread other than the training's own: of the engine, ZeroMQ or gloo."""
        return self.load.busiest / len(self.seconds) if self.load.busiest is not None and self.seconds else None


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 10th and 90th percentile (linear interpolation), or None without values."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return dict.fromkeys(("mean", "median", "p10", "p90"), seconds[0])
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {"mean": statistics.fmean(seconds), "median": statistics.median(seconds), "p10": tenths[0], "p90": tenths[8]}
