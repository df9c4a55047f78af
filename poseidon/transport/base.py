"""What the layers above ask of a transport: a few verbs, with an in-process and a ZeroMQ implementation.

An endpoint has one thread. It calls the handler for every message and runs what is posted to it; `send` is
legal only there. So whatever lives above (the exchange) needs no locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from poseidon.transport.frames import Header


class Handler(Protocol):
    """Called in the endpoint's thread."""

    def on_message(self, header: Header, payload: memoryview) -> None:
        """A checked message of this job. `payload` stays valid for as long as it is referenced."""

    def on_lost(self, rank: int, reason: str) -> None:
        """Nothing will come from `rank` any more, and it said no goodbye."""

    def on_error(self, error: Exception) -> None:
        """Something raised in the endpoint's thread: a posted call, a handler, or the endpoint itself."""


@dataclass
class Counters:
    """Bytes on the wire, headers included, by peer; what waits and what is in flight to all peers; and what strangers
    tried.

    Attributes:
        queued, most_queued: bytes of bulk messages that wait for room among those in flight: now, and at most so far.
        in_flight, most_in_flight: of those that have left, what receivers have not confirmed.
    """

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    queued: int = 0
    most_queued: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    stranger_frames: int = 0
    stranger_connections: int = 0

    def waits(self, nbytes: int) -> None:
        self.queued += nbytes
        self.most_queued = max(self.most_queued, self.queued)

    def flies(self, nbytes: int) -> None:
        self.in_flight += nbytes
        self.most_in_flight = max(self.most_in_flight, self.in_flight)


class Endpoint(Protocol):
    rank: int
    world_size: int
    counters: Counters

    def start(self, handler: Handler) -> None:
        """Deliver to `handler`; before the endpoint is connected to anyone."""

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` in the endpoint's thread, soon; from any thread."""

    def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False, priority: int = 0) -> None:
        """Queue a message; endpoint thread only. Never blocks. To a peer that left or was lost: nothing.

        To one peer messages of equal priority arrive in their order. BYE comes last, whatever its priority.

        Args:
            payload: an object with the buffer protocol; it is not copied and must keep its bytes until the
                peer has them (the caller learns that from the protocol above).
            urgent: overtake bulk data, on a connection of its own.
            priority: among the bulk data that still waits for this peer, lower leaves first.

        Raises:
            ValueError, TypeError, struct.error: a message that cannot be sent; nothing of it was.
        """

    def close(self, timeout: float) -> None:
        """Send what is queued, at most `timeout` seconds long, then free everything. Idempotent."""
