"""Endpoints with real sockets in one process, and a handler that remembers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from poseidon.transport import Header, Kind, ZmqEndpoint

TOKEN = b"0123456789abcdef"
LIMIT = 10.0


class Recorder:
    """What an endpoint reported."""

    def __init__(self) -> None:
        self.messages: list[tuple[Header, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        self.errors: list[Exception] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def on_message(self, header: Header, payload: memoryview) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.messages.append((header, bytes(payload)))
            self._changed.notify_all()

    def on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            self.lost.append((rank, reason))
            self._changed.notify_all()

    def on_error(self, error: Exception) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def wait(self, ready: Callable[[Recorder], Any], seconds: float = LIMIT) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self), seconds), vars(self)


def until(ready: Callable[[], Any], seconds: float = LIMIT) -> None:
    """For counters, which nobody announces."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def mesh(world: int, **options: Any) -> Iterator[tuple[list[ZmqEndpoint], list[Recorder]]]:
    """Connected endpoints; all closed at the end."""
    endpoints = [ZmqEndpoint(rank, world, **options) for rank in range(world)]
    recorders = [Recorder() for _ in endpoints]
    try:
        join(endpoints, recorders)
        yield endpoints, recorders
    finally:
        for endpoint in endpoints:
            endpoint.close(1)


def join(endpoints: list[ZmqEndpoint], recorders: list[Recorder], token: bytes = TOKEN) -> None:
    contacts = [endpoint.contact for endpoint in endpoints]
    for endpoint, recorder in zip(endpoints, recorders, strict=True):
        endpoint.start(recorder)
    with ThreadPoolExecutor(len(endpoints)) as pool:
        for future in [pool.submit(endpoint.connect, contacts, token, LIMIT) for endpoint in endpoints]:
            future.result(LIMIT)


def send(endpoint: ZmqEndpoint, peer: int, kind: Kind, payload: Any = None, **options: Any) -> None:
    endpoint.post(lambda: endpoint.send(peer, Header(kind, endpoint.rank), payload, **options))


def say_bye(endpoint: ZmqEndpoint) -> None:
    for peer in range(endpoint.world_size):
        if peer != endpoint.rank:
            send(endpoint, peer, Kind.BYE)
            send(endpoint, peer, Kind.BYE, urgent=True)


def ports(endpoint: ZmqEndpoint) -> tuple[int, int]:
    """Bulk and urgent."""
    _, bulk, urgent, _ = json.loads(endpoint.contact)
    return bulk, urgent
