"""Buffers (batch-norm statistics ...) of rank 0, on every rank when they are read.

What a training forward pass only writes costs no traffic while training: a rank asks rank 0 when it evaluates or
makes a ``state_dict``, for the buffers as they were when the last round closed. Rank 0 may be a forward pass ahead
by then, so it keeps a copy of them; when it leaves, everyone gets its last ones. What a training forward pass also
reads (power iterations of a spectral norm, code books ...) leaves rank 0 at the end of each round, and arrives
before the next training forward pass.

Alternatives: DDP broadcasts all buffers before every forward pass; a collective call by the user is forgotten, and
hangs in a rank that saves a checkpoint alone.
"""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from poseidon.engine.broadcast import TAG_BUFFERS, TAG_LIVE, give, take
from poseidon.engine.exchange import Exchange
from poseidon.transport import Kind


class Buffers:
    """One model's buffers. All but :meth:`_on_ask` belongs to the training thread."""

    def __init__(self, model: nn.Module, exchange: Exchange, index: int) -> None:
        self._exchange, self._index, self._model = exchange, index, model
        self._all = list(model.buffers())
        self._names = [name for name, _ in model.named_buffers()]
        self._live: list[torch.Tensor] = []
        self._owed = 0  # sets of live buffers on their way to this rank
        self._stale = False
        self._lock = threading.Lock()
        self._round = 0  # rounds closed
        self._kept: list[torch.Tensor] | None = None  # rank 0: of the last round's end, once training has gone on
        self._asking: dict[int, int] = {}  # rank 0: by rank, rounds after which it wants them
        self._versions = [buffer._version for buffer in self._all]
        if exchange.rank == 0:
            exchange.answer(index, self._on_ask)

    # --- around a training forward pass ------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Take the live buffers that are on their way."""
        for _ in range(self._owed):
            take(self._exchange, self._index, TAG_LIVE, self._live, "buffers")
        self._owed = 0

    @torch.no_grad()
    def begin(self) -> None:
        self._stale = bool(self._all) and self._exchange.rank != 0
        if self._exchange.rank == 0 and self._kept is None:
            with self._lock:
                self._kept = [buffer.clone() for buffer in self._all]

    # --- rounds ------------------------------------------------------------------------------------------------

    def changed(self) -> list[str]:
        """Rank 0, after the first round: names of the buffers that training changes and may read."""
        norms = {id(b) for m in self._model.modules() if isinstance(m, _NormBase) for b in m.buffers(False)}
        return [
            name
            for name, buffer, version in zip(self._names, self._all, self._versions, strict=True)
            if buffer._version != version and id(buffer) not in norms
        ]

    def keep_alive(self, names: list[str]) -> None:
        """What rank 0 found changed; from now on sent after each round, this one included."""
        self._live = [buffer for name, buffer in zip(self._names, self._all, strict=True) if name in set(names)]

    def round_closed(self) -> None:
        with self._lock:
            self._round += 1
            self._kept = None
            ready = [peer for peer, round_ in self._asking.items() if round_ <= self._round]
            for peer in ready:
                del self._asking[peer]
        if ready:
            give(self._exchange, self._index, TAG_BUFFERS, self._all, ready)
        if not self._live:
            return
        if self._exchange.rank == 0:
            give(self._exchange, self._index, TAG_LIVE, self._live, self._peers())
        else:
            self._owed += 1

    # --- reading -----------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Take rank 0's buffers if training has changed this rank's since the last time."""
        if not self._stale:
            return
        self._stale = False
        if not self._exchange.has_left(0):
            self._exchange.ask(0, self._index, self._round)
        elif not self._exchange.has_mail(Kind.STATE, 0, self._index, TAG_BUFFERS):
            return
        take(self._exchange, self._index, TAG_BUFFERS, self._all, "buffers")

    def _on_ask(self, peer: int, round_: int) -> None:
        with self._lock:
            if round_ > self._round:
                self._asking[peer] = round_
                return
            give(self._exchange, self._index, TAG_BUFFERS, self._kept or self._all, [peer])

    def leave(self) -> None:
        """Rank 0 will answer no more."""
        if self._exchange.rank == 0 and self._exchange.failure is None:
            give(self._exchange, self._index, TAG_BUFFERS, self._kept or self._all, self._peers())

    def _peers(self) -> range:
        return range(1, self._exchange.world_size)
