from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.transport.base import Counters
from poseidon.transport.flow import FIRST_WINDOW, HORIZON_SECONDS, LAST, LEAST_WINDOW, MOST_WINDOW, Flow

KIB = 1024


def drain(flow: Flow, peer: int, now: float = 0.0) -> list[tuple[object, int]]:
    """Everything that may leave now, with its marks."""
    found = []
    while (item := flow.next(peer, now)) is not None:
        found.append(item)
    return found


def test_lower_priorities_first_then_the_oldest():
    flow = Flow([1], Counters())
    flow.put(1, 0, FIRST_WINDOW, "fills the window")
    assert [message for message, _ in drain(flow, 1)] == ["fills the window"]
    for name, priority in [("c", 7), ("d", 7), ("bye", LAST), ("a", 1), ("b", 2)]:
        flow.put(1, priority, 10, name)
    assert drain(flow, 1) == []
    flow.confirm(1, FIRST_WINDOW, 0.1)
    assert [message for message, _ in drain(flow, 1)] == ["a", "b", "c", "d", "bye"]


def test_windows_are_each_peers_own():
    flow = Flow([1, 2], Counters())
    for peer in (1, 2):
        for _ in range(4):
            flow.put(peer, 0, FIRST_WINDOW, peer)
    assert len(drain(flow, 1)) == 2
    assert len(drain(flow, 2)) == 2
    flow.confirm(2, FIRST_WINDOW, 1.0)
    assert drain(flow, 1) == []
    assert len(drain(flow, 2, 1.0)) == 1


@pytest.mark.parametrize(
    ("rate", "window"),
    [(1e6, LEAST_WINDOW), (20e6, 20e6 * HORIZON_SECONDS), (5e9, MOST_WINDOW)],  # bytes/s
)
def test_the_window_follows_the_rate(rate, window):
    counters = Counters()
    flow = Flow([1], counters)
    size, now = 64 * KIB, 0.0
    wire: deque[int] = deque()
    for _ in range(3000):
        flow.put(1, 0, size, None)
    for step in range(2000):
        if step == 1000:
            counters.most_in_flight = 0
        wire += [mark for _, mark in drain(flow, 1, now)]
        now += size / rate
        if mark := wire.popleft():
            flow.confirm(1, mark, now)
    assert window * 0.7 - size <= counters.most_in_flight <= window * 1.1 + size


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 3 * MOST_WINDOW) | st.integers(1, 40 * KIB), st.integers(0, 5)), max_size=60),
    st.randoms(use_true_random=False),
)
def test_nothing_stands_still_and_in_flight_is_bounded(messages, random):
    """Whatever the sizes, the priorities and the pace: everything arrives, each priority in its order."""
    counters = Counters()
    flow = Flow([1], counters)
    waiting = deque(enumerate(messages))
    wire: deque[tuple[int, int, int]] = deque()  # number, priority, mark
    receipts: deque[int] = deque()
    arrived: list[tuple[int, int]] = []
    largest = max((size for size, _ in messages), default=0)
    now = 0.0

    def send() -> None:
        for (number, priority), mark in drain(flow, 1, now):
            wire.append((number, priority, mark))
        assert counters.in_flight <= max(MOST_WINDOW, MOST_WINDOW // 2 + largest, 2 * largest)

    while waiting or wire or receipts:
        now += random.random() * 10 ** random.randint(-6, 1)
        match random.choice([name for name, queue in (("put", waiting), ("take", wire), ("tell", receipts)) if queue]):
            case "put":
                number, (size, priority) = waiting.popleft()
                flow.put(1, priority, size, (number, priority))
            case "take":
                number, priority, mark = wire.popleft()
                arrived.append((priority, number))
                if mark:
                    receipts.append(mark)
            case "tell":
                flow.confirm(1, receipts.popleft(), now)
        send()
    assert not flow.waiting
    assert counters.queued == 0
    assert sorted(arrived) == sorted((priority, number) for number, (_, priority) in enumerate(messages))
    for level in range(6):
        its = [number for priority, number in arrived if priority == level]
        assert its == sorted(its)


def test_a_peer_that_is_gone():
    counters = Counters()
    flow = Flow([1, 2], counters)
    for _ in range(3):
        flow.put(1, 0, MOST_WINDOW, None)
    flow.put(2, 0, 100, None)
    assert len(drain(flow, 1)) == 2
    flow.drop(1)
    assert (counters.queued, counters.in_flight) == (100, 0)
    assert counters.most_queued == 3 * MOST_WINDOW + 100
    flow.confirm(1, MOST_WINDOW, 1.0)  # late
    assert drain(flow, 1) == []
    assert counters.in_flight == 0
    assert len(drain(flow, 2)) == 1
    assert not flow.waiting
