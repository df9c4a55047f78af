"""When does a broken connection mean that a peer is lost? Bookkeeping only: no sockets, no clock of its own.

Each peer has two connections to us, bulk and urgent (channels 0 and 1). Its death ends both at once. An orderly
end says BYE on both first; the peer may still be flushing one while it has closed the other, so a single broken
connection is no verdict until `DRAIN_SECONDS` have passed.
"""

from __future__ import annotations

from collections import defaultdict

#: After both connections from a peer have ended, how long what they still delivered may take to be read.
GRACE_SECONDS = 0.5
#: After one connection to or from a peer has ended, how long the peer may go on flushing the others.
DRAIN_SECONDS = 10.0
CHANNELS = 2


class Health:
    """The endpoint thread's view of its peers.

    Attributes:
        gone: peers that left or were lost: nothing is sent to them any more.
    """

    def __init__(self, peers: set[int]) -> None:
        self.gone: set[int] = set()
        self._peers = peers
        self._rank_of: dict[tuple[int, int], int] = {}  # (channel, file descriptor) -> rank
        self._hellos: dict[int, set[int]] = defaultdict(set)
        self._byes: dict[int, set[int]] = defaultdict(set)
        self._ended: dict[int, set[int]] = defaultdict(set)
        self._due: dict[int, float] = {}

    def hello(self, rank: int, channel: int, fd: int) -> None:
        self._rank_of[channel, fd] = rank
        self._hellos[rank].add(channel)

    def silent(self) -> list[int]:
        """Peers that have not said HELLO on both connections."""
        return sorted(peer for peer in self._peers if len(self._hellos[peer]) < CHANNELS)

    def bye(self, rank: int, channel: int) -> None:
        self._byes[rank].add(channel)
        if len(self._byes[rank]) == CHANNELS:
            self.gone.add(rank)
            self._due.pop(rank, None)

    def inbound_ended(self, channel: int, fd: int, now: float) -> bool:
        """False: this connection was never one of the job's."""
        rank = self._rank_of.pop((channel, fd), None)
        if rank is None:
            return False
        self._ended[rank].add(channel)
        self._doubt(rank, now)
        return True

    def outbound_ended(self, rank: int, now: float) -> None:
        self._doubt(rank, now)

    def _doubt(self, rank: int, now: float) -> None:
        if rank not in self.gone:
            due = now + (GRACE_SECONDS if len(self._ended[rank]) == CHANNELS else DRAIN_SECONDS)
            self._due[rank] = min(due, self._due.get(rank, due))

    def next_due(self) -> float | None:
        return min(self._due.values(), default=None)

    def lost(self, now: float) -> list[int]:
        """Peers that are lost as of now; each is returned once."""
        result = sorted(rank for rank, due in self._due.items() if due <= now)
        for rank in result:
            del self._due[rank]
            self.gone.add(rank)
        return result
