"""Queues of work, and alarms."""

from __future__ import annotations

import threading
import time

from poseidon.emulation.timeline import Alarms, Timeline, sleep_until


def test_jobs_in_a_row_begin_where_the_one_before_ended_even_if_they_are_queued_late() -> None:
    now = 100.0
    timeline = Timeline(lambda: now)
    timeline.ready()
    assert timeline.reserve(2.0) == 102.0
    now = 102.5  # the interpreter was late
    assert timeline.reserve(1.0) == 103.0
    now = 110.0
    timeline.ready()
    assert timeline.reserve(1.0) == 111.0
    timeline.ready()  # still busy: later, not now
    assert timeline.reserve(1.0) == 112.0


def test_a_sleep_ends_at_an_absolute_time() -> None:
    when = time.monotonic() + 0.02
    sleep_until(when)
    assert time.monotonic() >= when - 1e-4
    sleep_until(when - 1.0)  # long past: at once


def test_alarms_go_off_in_order_of_time_and_then_of_setting() -> None:
    alarms, seen, done = Alarms(), list[str](), threading.Event()
    base = time.monotonic()
    times = {}

    def call(name: str) -> None:
        seen.append(name)
        times[name] = time.monotonic()

    alarms.at(base + 0.06, lambda: (call("last"), done.set()))  # type: ignore[func-returns-value]
    alarms.at(base + 0.03, lambda: call("first"))
    alarms.at(base + 0.03, lambda: call("second"))
    alarms.at(base - 1.0, lambda: call("at once"))
    assert done.wait(10)
    assert seen == ["at once", "first", "second", "last"]
    assert times["first"] >= base + 0.03 - 1e-4
