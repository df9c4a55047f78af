"""Measures what plain TCP carries between hosts: ``python -m poseidon.emulation.goodput PHASES SECONDS``.

One process per host, started with torchrun's variables; no torch, one thread. PHASES is JSON: a list of phases, each
a list of flows [source, destination] that send as fast as they can at the same time. Rank 0 prints, in JSON, the
payload of each flow in bits per second as it came out at its destination, a list per phase. The hosts share a clock:
they are of one machine.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

Flow = tuple[int, int]

_WAIT = 30.0  # seconds for the others to appear, or to answer
_RETRY = 0.02  # seconds between attempts to reach one that does not listen yet
_WARM = 0.5  # seconds until windows have grown and queues have filled
_CHUNK = 256 * 1024


def main(argv: Sequence[str]) -> int:
    """Takes part in all phases."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    phases, seconds = json.loads(argv[0]), float(argv[1])
    circle = Circle(rank, size, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    results = [_measure(circle, [(a, b) for a, b in flows], seconds) for flows in phases]
    if rank == 0:
        print(json.dumps(results), flush=True)
    return 0


class Circle:
    """All ranks, each with a line to rank 0."""

    def __init__(self, rank: int, size: int, master: tuple[str, int]) -> None:
        self.rank = rank
        if rank == 0:
            with socket.create_server(master, backlog=size) as server:
                server.settimeout(_WAIT)
                lines = [_Line(server.accept()[0]) for _ in range(size - 1)]
            by_rank = {int(line.hear()): line for line in lines}
            self._lines = [by_rank[peer] for peer in range(1, size)]
        else:
            self._lines = [_Line(_reach(master))]
            self._lines[0].say(rank)
        self.address = self._lines[0].address if self._lines else master[0]

    def share(self, value: Any) -> list[Any]:
        """What every rank says, in rank order; returns when all have."""
        if self.rank:
            self._lines[0].say(value)
            return list(self._lines[0].hear())
        values = [value, *(line.hear() for line in self._lines)]
        for line in self._lines:
            line.say(values)
        return values


class _Line:
    """JSON, a line each, over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_WAIT)
        self.address = str(connection.getsockname()[0])
        self._file = connection.makefile("rw", encoding="utf-8")

    def say(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        return json.loads(self._file.readline())


def _measure(circle: Circle, flows: Sequence[Flow], seconds: float) -> list[float]:
    """Payload bits/s of each flow."""
    sources = [a for a, b in flows if b == circle.rank]
    with socket.create_server((circle.address, 0), backlog=len(flows)) as server:
        server.settimeout(_WAIT)
        where = circle.share(server.getsockname())
        out = [_reach(tuple(where[b])) for a, b in flows if a == circle.rank]
        came = {}
        for _ in sources:
            connection, (host, _) = server.accept()
            came[connection] = next(rank for rank, (address, _) in enumerate(where) if address == host)
    start = max(circle.share(time.monotonic())) + _WARM
    bits = _run(out, list(came), start, start + seconds)
    found = [dict(pairs) for pairs in circle.share([(rank, bits[connection]) for connection, rank in came.items()])]
    for connection in (*out, *came):  # after everyone has stopped sending
        connection.close()
    return [found[b][a] for a, b in flows]


def _run(
    out: Sequence[socket.socket], came: Sequence[socket.socket], start: float, end: float
) -> dict[socket.socket, float]:
    """Send on some, receive on others until ``end``; payload bits/s of those that receive, from ``start`` on."""
    selector, received, buffer = selectors.DefaultSelector(), dict.fromkeys(came, 0), bytearray(_CHUNK)
    for connection in (*out, *came):
        connection.setblocking(False)
        event = selectors.EVENT_READ if connection in received else selectors.EVENT_WRITE
        selector.register(connection, event, connection)
    began, before = 0.0, dict(received)
    while (now := time.monotonic()) < end:
        if not began and now >= start:
            began, before = now, dict(received)
        for key, _ in selector.select(end - now):
            ready: socket.socket = key.data
            if ready in received:
                received[ready] += ready.recv_into(buffer)
            else:
                ready.send(buffer)
    selector.close()
    return {connection: (count - before[connection]) * 8 / (now - began) for connection, count in received.items()}


def _reach(where: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            return socket.create_connection(where, _WAIT)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
