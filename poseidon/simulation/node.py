"""One node of a symmetric cluster. All nodes do the same at the same time, so that one stands for all: what it sends
leaves when what it receives comes in, and is with the others when theirs is here."""

from __future__ import annotations

from poseidon.planning.events import Clock, Priority, Station, Then
from poseidon.simulation.job import Job, Network


class Node:
    """Its stations, and what costs time on them; bytes are payload, seconds are those of the emulated accelerator.

    Attributes:
        sent: (time, bytes) of every transfer that has left.
    """

    def __init__(self, clock: Clock, job: Job, network: Network) -> None:
        self.clock = clock
        self.stations = {name: Station(clock) for name in ("device", "link", "copy_out", "copy_in", "server_sum")}
        self.sent: list[tuple[float, float]] = []
        self._job, self._network = job, network
        self._goodput = None if network.rate is None else network.rate * network.goodput / 8  # bytes/s

    def compute(self, seconds: float, then: Then, priority: Priority) -> None:
        self.stations["device"].do(seconds, then, priority)

    def to_host(self, nbytes: float, then: Then) -> None:
        self._at("copy_out", nbytes, self._job.host_copy, then)

    def to_device(self, nbytes: float, then: Then) -> None:
        self._at("copy_in", nbytes, self._job.host_copy, then)

    def add_up(self, nbytes: float, then: Then) -> None:
        self._at("server_sum", nbytes, self._job.server_sum, then)

    def transfer(self, nbytes: float, then: Then, priority: Priority = (), hops: int = 1) -> None:
        """Send so many bytes, to all peers together; `then` runs when as many have come in from them.

        Args:
            hops: one after the other, for which only what comes next waits, not the link.
        """
        if not nbytes:
            self.clock.after(0.0, then)
            return

        def left() -> None:
            self.sent.append((self.clock.now, nbytes))
            self.clock.after(hops * self._network.hop, then)

        self._at("link", nbytes, self._goodput, left, priority)

    def _at(self, station: str, nbytes: float, rate: float | None, then: Then, priority: Priority = ()) -> None:
        self.stations[station].do(nbytes / rate if rate else 0.0, then, priority)
