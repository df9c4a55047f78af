"""When messages were on the wire, as far as two ranks' traces together tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from poseidon.tracing import Event, Row


@dataclass(frozen=True)
class Transfer:
    """A message on its way. ``start``: at the earliest, when it had been queued and the one before it between the same
    two had come; ``end``: when it was there, and its receiver took it."""

    sender: int
    receiver: int
    start: float
    end: float
    event: Event  # of its coming

    @property
    def message(self) -> str:
        return str(self.event.details["message"])


def transfers(ranks: Mapping[int, Iterable[Event]]) -> list[Transfer]:
    """Of all messages that came while traces were kept, in the order in which they came. Of one that was sent before
    them nothing is known but its coming: it takes no time."""
    queued: dict[str, tuple[int, float]] = {}
    came: list[tuple[int, Event]] = []
    for rank, events in ranks.items():
        for event in events:
            if event.row is Row.send:
                queued[str(event.details["message"])] = (rank, event.start)
            elif event.row is Row.receive:
                came.append((rank, event))
    found: list[Transfer] = []
    free: dict[tuple[int, int], float] = {}
    for receiver, event in sorted(came, key=lambda each: each[1].start):
        sender, start = queued.get(str(event.details["message"]), (int(event.details["peer"]), event.start))
        pair = (sender, receiver)
        begun = min(event.start, max(start, free.get(pair, start)))
        free[pair] = event.start
        found.append(Transfer(sender, receiver, begun, event.start, event))
    return found
