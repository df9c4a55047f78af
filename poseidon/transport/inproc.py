"""Ranks as threads of one process: the transport of most tests, and the oracle of the ZeroMQ one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from poseidon.transport.base import Counters, Handler
from poseidon.transport.frames import HEADER_BYTES, Header, pack, sized, unpack

_TOKEN = bytes(16)


class InprocEndpoint:
    """Delivers into the peer's queue; payloads are copied and headers packed and checked, as on a wire. What is sent
    arrives at once: nothing waits that another message could overtake, so priorities change nothing."""

    def __init__(self, rank: int, peers: list[InprocEndpoint]) -> None:
        self.rank = rank
        self.counters = Counters()
        self._peers = peers
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._handler: Handler | None = None
        self._thread: threading.Thread | None = None

    @property
    def world_size(self) -> int:
        return len(self._peers)

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._thread = threading.Thread(target=self._run, name=f"poseidon-comm-{self.rank}", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], object]) -> None:
        self._inbox.put(call)

    def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False, priority: int = 0) -> None:
        data = b"" if payload is None else bytes(payload)
        head = pack(sized(header, len(data)), _TOKEN)
        self.counters.sent[peer] += HEADER_BYTES + len(data)
        self._peers[peer].receive(head, data)

    def receive(self, head: bytes, data: bytes) -> None:
        self._inbox.put(lambda: self._deliver(head, data))

    def _deliver(self, head: bytes, data: bytes) -> None:
        header = unpack(head, _TOKEN, self.world_size, len(data))
        if header is None or header.rank == self.rank:
            self.counters.stranger_frames += 1
            return
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
            try:
                call()
            except Exception as error:
                if self._handler is not None:
                    self._handler.on_error(error)


def inproc_mesh(world_size: int, kind: type[InprocEndpoint] = InprocEndpoint) -> list[InprocEndpoint]:
    """One endpoint per rank, all connected."""
    peers: list[InprocEndpoint] = []
    peers.extend(kind(rank, peers) for rank in range(world_size))
    return peers
