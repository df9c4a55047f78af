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
    """Bytes on the wire, headers included, by peer; and what strangers tried."""

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    stranger_frames: int = 0
    stranger_connections: int = 0


class Endpoint(Protocol):
    rank: int
    world_size: int
    counters: Counters

    def start(self, handler: Handler) -> None:
        """Deliver to `handler`; before the endpoint is connected to anyone."""

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` in the endpoint's thread, soon; from any thread."""

    def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False) -> None:
        """Queue a message; endpoint thread only. Never blocks. To a peer that left or was lost: nothing.

        Args:
            payload: an object with the buffer protocol; it is not copied and must keep its bytes until the
                peer has them (the caller learns that from the protocol above).
            urgent: overtake bulk data, on a connection of its own.

        Raises:
            ValueError, TypeError, struct.error: a message that cannot be sent; nothing of it was.
        """

    def close(self, timeout: float) -> None:
        """Send what is queued, at most `timeout` seconds long, then free everything. Idempotent."""
