"""What a simulation found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Parts of a node that work at the same time as the others: the accelerator, its link's way out, the copy engines to
#: the host and from it, the host's sums.
PARTS = ("device", "link", "copy_out", "copy_in", "server_sum")
#: A device that works for this share of an iteration is what limits it.
_FULL = 0.98

Intervals = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Outcome:
    """One iteration of one node, in the steady state; all nodes do the same.

    Attributes:
        seconds: of the iteration.
        single: seconds of an iteration of one machine that communicates with nobody.
        nodes: that work.
        bytes_sent: payload that a node sends.
        busy: seconds that each of :data:`PARTS` works.
        waits: of each part but the device, seconds that it works while the device does not.
    """

    seconds: float
    single: float
    nodes: int
    bytes_sent: float
    busy: Mapping[str, float]
    waits: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """Rows per second of all nodes over those of one machine with comm=single."""
        return self.nodes * self.single / self.seconds

    @property
    def bound(self) -> float:
        """Seconds of the busiest part: no order of the same work is faster."""
        return max(self.busy.values())

    @property
    def limit(self) -> str:
        """The device, if it hardly ever waits; else what works most while it does; ``latency`` if nothing does."""
        idle = self.seconds - self.busy["device"]
        if idle <= (1 - _FULL) * self.seconds:
            return "device"
        part = max(self.waits, key=lambda name: self.waits[name])
        return part if self.waits[part] >= 0.1 * idle else "latency"


def within(intervals: Intervals, start: float, end: float) -> list[tuple[float, float]]:
    """The parts of intervals that lie between two times."""
    return [(max(a, start), min(b, end)) for a, b in intervals if b > start and a < end]


def total(intervals: Intervals) -> float:
    return sum(b - a for a, b in intervals)


def shared(one: Intervals, other: Intervals) -> float:
    """Seconds that lie in intervals of both; each in order, without overlap."""
    i = j = 0
    seconds = 0.0
    while i < len(one) and j < len(other):
        seconds += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return seconds
