"""Flow control over real sockets."""

from __future__ import annotations

import threading
import time

import pytest

from poseidon.transport import Header, Kind, ZmqEndpoint
from poseidon.transport.flow import MOST_WINDOW
from tests.transport.mesh import LIMIT, Recorder, join, mesh, say_bye, send, until

PIECE = 1 << 20


class Blocked(Recorder):
    """Its endpoint's thread stops at the first PUSH until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def on_message(self, header, payload) -> None:
        if header.kind is Kind.PUSH:
            self.go.wait(LIMIT)
        super().on_message(header, payload)


def flood(endpoint: ZmqEndpoint, peer: int, number: int, size: int = PIECE, priority: int = 9) -> None:
    """Queued all at once, in its thread; returns when they are."""
    data, done = bytes(size), threading.Event()

    def queue() -> None:
        for unit in range(number):
            endpoint.send(peer, Header(Kind.PUSH, endpoint.rank, unit=unit), data, priority=priority)
        done.set()

    endpoint.post(queue)
    assert done.wait(LIMIT)


def connected(recorders: list[Recorder], **options) -> list[ZmqEndpoint]:
    endpoints = [ZmqEndpoint(rank, len(recorders), **options) for rank in range(len(recorders))]
    join(endpoints, recorders)
    return endpoints


@pytest.fixture
def blocked():
    """Endpoints whose rank 1 takes nothing for the moment; and that one's recorder."""
    recorders = [Recorder(), Blocked()]
    endpoints = connected(recorders)
    yield endpoints, recorders
    recorders[1].go.set()
    for endpoint in endpoints:
        endpoint.close(1)


def test_in_flight_is_bounded_and_what_is_urgent_passes(blocked):
    endpoints, recorders = blocked
    flood(endpoints[0], 1, 40)
    counters = endpoints[0].counters
    send(endpoints[0], 1, Kind.TEXT, b"urgent", urgent=True)
    assert counters.in_flight <= MOST_WINDOW
    assert counters.queued >= 30 * PIECE
    recorders[1].go.set()
    recorders[1].wait(lambda r: len(r.messages) == 41)
    assert [h.unit for h, _ in recorders[1].messages if h.kind is Kind.PUSH] == list(range(40))
    assert [h.kind for h, _ in recorders[1].messages].index(Kind.TEXT) <= 1
    assert counters.most_in_flight <= MOST_WINDOW + PIECE
    until(lambda: counters.queued == 0)


def test_a_late_front_layer_overtakes_what_is_queued(blocked):
    endpoints, recorders = blocked
    flood(endpoints[0], 1, 40)
    send(endpoints[0], 1, Kind.PULL, b"front layer", priority=1)
    done = threading.Event()
    endpoints[0].post(done.set)
    assert done.wait(LIMIT)
    recorders[1].go.set()
    recorders[1].wait(lambda r: len(r.messages) == 41)
    assert [h.kind for h, _ in recorders[1].messages].index(Kind.PULL) <= 9


def test_all_to_all_at_once():
    """Everyone has far more for everyone than windows hold, of all sizes; and both directions need receipts."""
    sizes = [0, 1, 70_000, 300_000, PIECE, 5 * PIECE]
    with mesh(3, encryption="curve") as (endpoints, recorders):
        for endpoint in endpoints:
            for peer in {0, 1, 2} - {endpoint.rank}:
                for size in sizes:
                    flood(endpoint, peer, 2, size, priority=size % 5)
        for recorder in recorders:
            recorder.wait(lambda r: len(r.messages) == 4 * len(sizes), 30)
            for sender in {h.rank for h, _ in recorder.messages}:
                assert sorted(len(p) for h, p in recorder.messages if h.rank == sender) == sorted(2 * sizes)
        assert all(endpoint.counters.queued == 0 for endpoint in endpoints)


# --- the end ------------------------------------------------------------------------------------------------


def test_both_close_with_much_that_waits():
    """Whoever is through first hears no more, and gives the other one no receipts: neither may wait for long."""
    recorders = [Recorder(), Recorder()]
    endpoints = connected(recorders)
    for endpoint in endpoints:
        flood(endpoint, 1 - endpoint.rank, 40)
        say_bye(endpoint)
    ends = [threading.Thread(target=endpoint.close, args=(3,)) for endpoint in endpoints]
    start = time.monotonic()
    for end in ends:
        end.start()
    for end in ends:
        end.join(2 * LIMIT)
    assert time.monotonic() - start < 6
    for recorder in recorders:
        assert recorder.lost == []
        assert recorder.errors == []


def test_close_gives_up_on_a_peer_that_takes_nothing(blocked):
    endpoints, _ = blocked
    flood(endpoints[0], 1, 40)
    start = time.monotonic()
    endpoints[0].close(0.5)
    assert time.monotonic() - start < 3


def test_what_waits_for_a_peer_that_left_is_dropped(blocked):
    endpoints, recorders = blocked
    flood(endpoints[0], 1, 40)
    recorders[1].go.set()
    say_bye(endpoints[1])
    recorders[0].wait(lambda r: len(r.messages) == 2)
    until(lambda: endpoints[0].counters.queued == 0)
    send(endpoints[0], 1, Kind.PUSH, b"to nobody")
    start = time.monotonic()
    endpoints[0].close(LIMIT)
    assert time.monotonic() - start < LIMIT / 2
    assert recorders[0].lost == []
