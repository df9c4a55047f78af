"""Flow control: what waits for each peer, in which order it leaves, and how much of it may be under way.

What a socket holds can't be overtaken any more, so bulk messages wait here until there is room among their peer's
bytes in flight. Room comes back by receipts: a message's header says when its receiver is to confirm all up to it
(`mark`), about once per half of the window. So the sender alone knows of windows, and a receiver has neither a
count to keep nor a rest to grant when traffic stops. No sockets here, no clock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from poseidon.transport.base import Counters

#: To each peer there may be as much in flight as it takes in this time: enough for a receipt's way on fast links, and
#: behind full queues, little enough to be overtaken on slow ones. Within these bounds, in bytes; two messages always.
HORIZON_SECONDS = 0.12
LEAST_WINDOW, MOST_WINDOW = 512 * 1024, 8 * 1024 * 1024
FIRST_WINDOW = 1024 * 1024
#: Behind everything else.
LAST = 1 << 63
#: Share of the newest measurement in the rate.
_NEWEST = 0.25


class _Asked(NamedTuple):
    """A receipt under way: for all up to `mark`, when it was asked for, and what had been confirmed then."""

    mark: int
    time: float
    confirmed: int


class _Lane:
    """Everything for one peer. Positions count the bytes that have left."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, int, Any]] = []  # heap of (priority, age, bytes, message)
        self.window = FIRST_WINDOW
        self.left = self.confirmed = 0
        self._rate = 0.0
        self._asked: deque[_Asked] = deque()
        self._mark = 0  # the last one asked for

    def may_send(self) -> bool:
        """Never waits for a receipt that nobody has been asked for, so that no queue stands still for good. However
        large messages are, behind one that is on its way there is another: else the link would idle until a receipt."""
        nbytes = self.queue[0][2]
        return not self._asked or self.left - self.confirmed + nbytes <= max(self.window, 2 * nbytes)

    def send(self, now: float) -> tuple[int, int, Any]:
        """Bytes, the mark to ask for (0: none), and the message."""
        _, _, nbytes, message = heappop(self.queue)
        self.left += nbytes
        if self.left - self._mark < self.window // 2:
            return nbytes, 0, message
        self._mark = self.left
        self._asked.append(_Asked(self.left, now, self.confirmed))
        return nbytes, self.left, message

    def confirm(self, mark: int, now: float) -> None:
        asked = None
        while self._asked and self._asked[0].mark <= mark:
            asked = self._asked.popleft()
        if asked is None:
            return
        rate = (asked.mark - asked.confirmed) / max(now - asked.time, 1e-6)
        self._rate += (rate - self._rate) * (_NEWEST if self._rate else 1.0)
        self.window = int(min(max(self._rate * HORIZON_SECONDS, LEAST_WINDOW), MOST_WINDOW))
        self.confirmed = asked.mark


class Flow:
    """All peers' queues. Windows are each peer's own, so that none waits for another one.

    Args:
        counters: bytes that wait, and that are in flight, are noted there.
    """

    def __init__(self, peers: Iterable[int], counters: Counters) -> None:
        self._lanes = {peer: _Lane() for peer in peers}
        self._ages = count()
        self._counters = counters

    def put(self, peer: int, priority: int, nbytes: int, message: Any) -> None:
        """A message for `peer` waits: behind all of lower or, if older, of equal `priority`."""
        heappush(self._lanes[peer].queue, (priority, next(self._ages), nbytes, message))
        self._counters.waits(nbytes)

    def next(self, peer: int, now: float) -> tuple[Any, int] | None:
        """The message that leaves now, and its mark; None if none may."""
        lane = self._lanes[peer]
        if not lane.queue or not lane.may_send():
            return None
        nbytes, mark, message = lane.send(now)
        self._counters.waits(-nbytes)
        self._counters.flies(nbytes)
        return message, mark

    def confirm(self, peer: int, mark: int, now: float) -> None:
        """`peer` has taken all up to `mark`."""
        lane = self._lanes[peer]
        before = lane.confirmed
        lane.confirm(mark, now)
        self._counters.flies(before - lane.confirmed)

    def drop(self, peer: int) -> None:
        """`peer` has left, or is lost: what is for it goes nowhere."""
        lane = self._lanes[peer]
        self._counters.waits(-sum(nbytes for _, _, nbytes, _ in lane.queue))
        self._counters.flies(lane.confirmed - lane.left)
        self._lanes[peer] = _Lane()

    @property
    def waiting(self) -> bool:
        return any(lane.queue for lane in self._lanes.values())
