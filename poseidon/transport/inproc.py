"""Ranks as threads of one process: the transport of most tests, and the oracle of the ZeroMQ one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from poseidon.transport.base import Counters, Handler
from poseidon.transport.frames import HEADER_BYTES, Header, sized


class InprocEndpoint:
    """Delivers into the peer's queue; payloads are copied, as a wire would."""

    def __init__(self, rank: int, peers: list[InprocEndpoint]) -> None:
        self.rank = rank
        self.counters = Counters()
        self._peers = peers
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._handler: Handler | None = None
        self._thread: threading.Thread | None = None

    @property
    def world_size(self) -> int:
        return len(self._peers)

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._thread = threading.Thread(target=self._run, name=f"poseidon-comm-{self.rank}", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)

    def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False) -> None:
        data = b"" if payload is None else bytes(payload)
        header = sized(header, len(data))
        self.counters.sent[peer] += HEADER_BYTES + len(data)
        self._peers[peer].receive(header, data)

    def receive(self, header: Header, data: bytes) -> None:
        self._inbox.put(lambda: self._deliver(header, data))

    def _deliver(self, header: Header, data: bytes) -> None:
        self.counters.received[header.rank] += HEADER_BYTES + len(data)
        assert self._handler is not None
        self._handler.on_message(header, memoryview(bytearray(data)))

    def lose(self, rank: int, reason: str) -> None:
        """A test's fault: as if the connection to `rank` had been reset."""
        self._inbox.put(lambda: self._handler.on_lost(rank, reason) if self._handler else None)

    def close(self, timeout: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._inbox.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _run(self) -> None:
        while True:
            try:
                call = self._inbox.get(timeout=600)
            except Empty:
                continue
            if call is None:
                return
            call()


def inproc_mesh(world_size: int, kind: type[InprocEndpoint] = InprocEndpoint) -> list[InprocEndpoint]:
    """One endpoint per rank, all connected."""
    peers: list[InprocEndpoint] = []
    peers.extend(kind(rank, peers) for rank in range(world_size))
    return peers
