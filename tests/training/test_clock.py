"""Which iterations count."""

from __future__ import annotations

import pytest

from poseidon.training import clock as clocks
from poseidon.training.clock import IterationClock, spread


@pytest.fixture
def passes(monkeypatch):
    """Lets wall and CPU time pass."""
    times = {"perf_counter": 0.0, "process_time": 0.0}
    for name in times:
        monkeypatch.setattr(clocks.time, name, lambda name=name: times[name])

    def pass_(wall: float, cpu: float = 0.0) -> None:
        times["perf_counter"] += wall
        times["process_time"] += cpu

    return pass_


def run(clock, passes, *seconds: float) -> None:
    for each in seconds:
        passes(each, each / 2)
        clock.tick()


def test_the_first_iterations_are_left_out_and_the_mean_has_the_rest_of_the_last(passes):
    clock = IterationClock(warmup=3)
    run(clock, passes, 9, 9, 9, 1, 2, 3)
    passes(6, 1)
    clock.end()
    assert list(clock.seconds) == [1, 2, 3]
    assert clock.spread == {"mean": 4, "median": 2, "p10": pytest.approx(1.2), "p90": pytest.approx(2.8), "max": 3}
    assert clock.cpu_seconds_per_iteration == pytest.approx((0.5 + 1 + 1.5 + 1) / 3)


def test_times_are_undilated_and_pauses_are_not_in_them(passes):
    clock = IterationClock(dilation=2)
    run(clock, passes, 4, 4)
    with clock.paused():
        passes(100, 100)
    run(clock, passes, 4)
    clock.end()
    assert list(clock.seconds) == [2, 2]
    assert clock.cpu_seconds_per_iteration == 2


def test_stalls_are_those_of_the_iterations_that_count(passes):
    stalls = iter((5.0, 11.0))
    clock = IterationClock(dilation=2, warmup=2, stalled=lambda: next(stalls))
    run(clock, passes, 1, 1, 1, 1, 1)
    clock.end()
    assert clock.stall_seconds_per_iteration == 1


def test_a_run_that_only_warms_up_tells_no_time(passes):
    clock = IterationClock(warmup=5)
    run(clock, passes, 1, 1)
    clock.end()
    assert (clock.spread, clock.cpu_seconds_per_iteration, clock.stall_seconds_per_iteration) == (None, None, None)
    assert spread([]) is None
