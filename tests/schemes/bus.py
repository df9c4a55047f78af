"""Ranks in one thread: every order in which messages may arrive, one at a time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from poseidon.planning import Book
from poseidon.schemes import Context, Contribution, Share, make_scheme, reconstruct
from poseidon.transport import Header
from poseidon.transport.frames import pack, sized, unpack

TOKEN = bytes(16)


class Bus:
    """One unit on `world_size` ranks. Between two ranks messages keep their order, otherwise anything goes."""

    def __init__(self, book: Book, dtype: torch.dtype, piece_bytes: int, seed: int, *, sparse: bool = False) -> None:
        self.random = random.Random(seed)
        self.wires: dict[tuple[int, int], deque[tuple[bytes, Any]]] = {}
        self.results: list[list[Any]] = [[] for _ in book.topology.workers]
        self.sent: list[tuple[int, int, Header]] = []  # by whom, to whom, what
        self.working: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        world = len(book.topology.workers)
        self.schemes = [
            make_scheme(
                book.units[0],
                Context(
                    rank,
                    book.topology,
                    0,
                    0,
                    dtype,
                    piece_bytes,
                    2,
                    self._sender(rank),
                    self._done(rank),
                    reconstruct,
                    sparse=sparse,
                    work=lambda call, then: self.working.append((call, then)),
                ),
            )
            for rank in range(world)
        ]

    def _sender(self, rank: int) -> Callable[[int, Header, Any], None]:
        def send(peer: int, header: Header, payload: Any) -> None:
            length = 0 if payload is None else payload.nbytes
            self.sent.append((rank, peer, sized(header, length)))
            # As with zero-copy: the bytes are read only when the message arrives.
            self.wires.setdefault((rank, peer), deque()).append((pack(self.sent[-1][2], TOKEN), payload))

        return send

    def _done(self, rank: int) -> Callable[[int, int, Any], None]:
        def done(round_: int, unit: int, result: Any) -> None:
            if not isinstance(result, Share):
                self.results[rank].append(result)
                return
            shape = torch.Size(self.schemes[rank].unit.shape)
            values = reconstruct(result.contributions, shape, torch.float32, result.rows)
            self.schemes[rank].share(round_, result.rows.start, values)

        return done

    def deliver(self, wire: tuple[int, int]) -> None:
        head, payload = self.wires[wire].popleft()
        data = bytearray(b"" if payload is None else payload)
        header = unpack(head, TOKEN, len(self.schemes), len(data))
        assert header is not None
        self.schemes[wire[1]].on_message(header, memoryview(data))

    def run(
        self,
        rounds: int,
        contribution: Callable[[int, int], Contribution],
        finish: Callable[[int, int, Any], None],
    ) -> None:
        """Each rank contributes to a round as soon as it has the result of the one before, or whenever later.

        Args:
            contribution: (rank, round) -> what that rank adds. finish: (rank, round, result).
        """
        world = len(self.schemes)
        begun, ended = [0] * world, [0] * world
        while True:
            ready: Sequence[int] = [r for r in range(world) if begun[r] == ended[r] < rounds]
            full = [wire for wire, queue in self.wires.items() if queue]
            if not ready and not full and not self.working:
                break
            choice = self.random.randrange(len(ready) + len(full) + bool(self.working))
            if choice == len(ready) + len(full):
                call, then = self.working.popleft()
                then(call())
            elif choice < len(ready):
                rank = ready[choice]
                begun[rank] += 1
                self.schemes[rank].contribute(begun[rank] - 1, contribution(rank, begun[rank] - 1))
            else:
                self.deliver(full[choice - len(ready)])
            for rank in range(world):
                while len(self.results[rank]) > ended[rank]:
                    finish(rank, ended[rank], self.results[rank][ended[rank]])
                    ended[rank] += 1
        assert ended == [rounds] * world, [scheme.waits_for() for scheme in self.schemes]
        assert all(scheme.waits_for() == [] for scheme in self.schemes)
