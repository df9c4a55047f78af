"""An endpoint that misbehaves as told, around any other: faults by message kind and count."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from poseidon.transport.base import Endpoint, Handler
from poseidon.transport.frames import Header, Kind


@dataclass(frozen=True)
class Fault:
    """What happens to the `nth` to `nth + times - 1` message of a kind that this rank sends (counted from 1).

    Attributes:
        action: ``drop``; ``delay`` by `seconds` (later messages overtake it); ``corrupt``: arrives with a header
            that does not check; ``kill``: this rank dies before sending it.
        peer: only messages to this rank count; None: all.
    """

    action: Literal["drop", "delay", "corrupt", "kill"]
    kind: Kind
    nth: int = 1
    times: int = 1
    peer: int | None = None
    seconds: float = 0.0


class FaultyEndpoint:
    """Sends through `inner`, with faults.

    Args:
        on_kill: what dying means; default: SIGKILL to this process. Nothing is sent afterwards.
    """

    def __init__(
        self,
        inner: Endpoint,
        faults: list[Fault],
        on_kill: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.counters = inner.counters
        self.hits: Counter[Fault] = Counter()
        self._faults = faults
        self._seen: Counter[Fault] = Counter()
        self._on_kill = on_kill
        self._dead = False

    def start(self, handler: Handler) -> None:
        self.inner.start(handler)

    def post(self, call: Callable[[], object]) -> None:
        self.inner.post(call)

    def close(self, timeout: float) -> None:
        self.inner.close(timeout)

    def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False, priority: int = 0) -> None:
        fault = self._match(peer, header)
        if fault is not None and fault.action == "kill" and not self._dead:
            self._dead = True
            self._on_kill()
        if self._dead or (fault is not None and fault.action == "drop"):
            return
        if fault is None:
            self.inner.send(peer, header, payload, urgent=urgent, priority=priority)
        elif fault.action == "corrupt":
            self.inner.send(peer, header._replace(rank=0xFFFF), payload, urgent=urgent, priority=priority)
        else:
            data = None if payload is None else bytes(payload)
            send = partial(self.inner.send, peer, header, data, urgent=urgent, priority=priority)
            later = threading.Timer(fault.seconds, self.inner.post, (send,))
            later.daemon = True
            later.start()

    def _match(self, peer: int, header: Header) -> Fault | None:
        found = None
        for fault in self._faults:
            if fault.kind is header.kind and fault.peer in (None, peer):
                self._seen[fault] += 1
                if fault.nth <= self._seen[fault] < fault.nth + fault.times:
                    self.hits[fault] += 1
                    found = found or fault
        return found
