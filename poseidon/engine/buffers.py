"""Buffers (batch-norm statistics ...) of rank 0, on every rank when they are read.

What a training forward pass only writes costs no traffic while training: a rank asks rank 0 when it evaluates, copies
or makes a ``state_dict``, for the buffers as they were when rank 0 stood at the same place: so many rounds closed, so
many training forward passes since. Rank 0 may be ahead by then, so it keeps a copy of them; if it will not come to
that place (it closes its round, evaluates, leaves), everyone gets what it has. So rank 0 has nothing to do for it, and
any rank alone may read.

What a training forward pass also reads arrives before it: the buffers that rank 0 saw change in the first round
(power iterations of a spectral norm, code books ...) leave it at the end of each round; those that change later are
asked for at the end of each round; a norm that was trained and is frozen now (``eval()``) asks before it reads.

Alternatives: DDP broadcasts all buffers before every forward pass; a collective call by the user is forgotten, and
hangs in a rank that saves a checkpoint alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from poseidon.engine.backward import Hook
from poseidon.engine.broadcast import TAG_BUFFERS, TAG_LIVE, give_named, take_named
from poseidon.engine.exchange import Exchange
from poseidon.errors import PoseidonError, UserError
from poseidon.transport import Kind

log = logging.getLogger("poseidon")

#: Copies that rank 0 keeps of one round, besides that of its beginning: the others may be so many readings behind.
SHOTS = 8
Tensors = dict[str, torch.Tensor]
#: Tensors with their versions, by name.
Marks = dict[str, tuple[torch.Tensor, int]]


class Buffers:
    """One model's buffers. All but :meth:`_on_ask` belongs to the training thread."""

    def __init__(self, model: nn.Module, exchange: Exchange, index: int) -> None:
        self._exchange, self._index = exchange, index
        self._holders = [(f"{name}." if name else "", m) for name, m in model.named_modules() if m._buffers]
        self._norms = {prefix for prefix, m in self._holders if isinstance(m, _NormBase)}
        self._answers = exchange.rank == 0
        self._live: set[str] = set()  # by name, what rank 0 sends after each round
        self._late: set[str] = set()  # what this rank asks for after each round
        self._owed = 0  # sets of live buffers on their way to this rank
        self._asked: int | None = None  # the number of a question about late ones that is not answered yet
        self._questions = 0
        self._stale = False
        self._dirty: set[nn.Module] = set()  # trained since they were rank 0's
        self._by_hand: set[nn.Module] = set()  # loaded since they were trained
        self._in_root = False
        self._before: Marks | None = None  # all but norms' as they were before the first pass of the round
        self._after: Marks = {}  # norms' buffers as the last training pass left them
        self._lock = threading.Lock()
        # Where this rank stands: rounds closed, and training forward passes done since.
        self._round, self._passes = 0, 0
        self._shots: list[tuple[int, Tensors]] = []  # rank 0: as of so many passes, once training has gone on
        self._past: list[tuple[int, Tensors]] = []  # and those of the round before, where it does not wait for others
        self._waiting: dict[int, tuple[int, int, int]] = {}  # rank 0: by rank, number of its question and its place
        self._running = False  # rank 0: inside a training forward pass
        self._paused = False  # rank 0: no further pass may come before the others go on
        self._read = False  # rank 0: read since its last pass, as the others may want to
        if self._answers:
            exchange.answer(index, self._on_ask)

    def hook(self) -> list[RemovableHandle]:
        """Of every module that holds buffers: it may be called, loaded or copied without the whole model."""
        handles = []
        for _, module in self._holders:
            hook = Hook(self._before_module, partial(self.copied, module))
            handles.append(module.register_forward_pre_hook(hook))
            handles.append(module.register_load_state_dict_pre_hook(Hook(self._before_load)))
        return handles

    # --- around a training forward pass ------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Take the buffers that are on their way to be read by a training forward pass."""
        for _ in range(self._owed):
            live = take_named(self._exchange, self._index, TAG_LIVE, "buffers")[1]
            self._write(live, self._live - self._names(self._by_hand))
        self._owed = 0
        if self._asked is not None:
            number, self._asked = self._asked, None
            self._write(self._take(number), self._late - self._names(self._by_hand))

    def begin(self) -> None:
        """A training forward pass of the whole model begins."""
        self._in_root = True
        self._written()
        if not self._answers:
            return
        with self._lock:
            if self._read:
                self._shoot()
            self._running, self._paused, self._read = True, False, False

    def _written(self) -> None:
        """Training is about to write buffers."""
        self._after = {}
        if self._before is None:
            self._before = self._marks({prefix for prefix, _ in self._holders} - self._norms)
        if not self._answers:
            self._stale = bool(self._holders)
        elif not self._shots:
            with self._lock:
                self._shoot()

    def _shoot(self) -> None:
        """Keep a copy: of the round's beginning, and the latest of what other ranks may want."""
        shot = {name: t.detach().clone() for name, t in self._all()}
        self._shots = [*self._shots[:1], *self._shots[1:][1 - SHOTS :], (self._passes, shot)]

    def finish(self) -> None:
        """A training forward pass of the whole model has ended."""
        if not self._in_root:
            return
        self._in_root = False
        if self._exchange.rank != 0:
            self._after = self._marks(self._norms)
        with self._lock:
            self._passes += 1
            self._running = False
        self._answer()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module.training:
            self._dirty.add(module)
            self._by_hand.discard(module)
            if not self._in_root:
                self._written()
        elif not self._in_root:
            self.fetch()
        elif module in self._dirty and not self._answers:
            self._thaw()

    def _thaw(self) -> None:
        """Frozen now, but trained before: as of the beginning of this round, which is never far. Only layers that this
        pass has not used yet are written to."""
        frozen = {m for m in self._dirty if not m.training}
        self._dirty -= frozen
        self._write(self._take(self._ask(0)), self._names(frozen - self._by_hand))

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if any(prefix + key in state for key in module._buffers):
            self._by_hand.add(module)

    # --- rounds ------------------------------------------------------------------------------------------------

    def changed(self) -> list[str]:
        """Rank 0, after the first round: names of the buffers that training changes and may read."""
        return sorted(self._changed())

    def keep_alive(self, names: list[str]) -> None:
        """What rank 0 found changed; from now on sent after each round, this one included."""
        self._live = set(names)

    def round_closed(self) -> None:
        late, self._before = self._changed(), None
        with self._lock:
            self._round, self._passes, self._past, self._shots = self._round + 1, 0, self._shots, []
            self._running = self._paused = self._read = False
        self._answer()
        if self._answers:
            if self._live:
                live = {name: t for name, t in self._all() if name in self._live}
                give_named(self._exchange, self._index, TAG_LIVE, live, self._peers())
            return
        self._stale = bool(self._holders)
        self._owed += bool(self._live)
        self._late |= late - self._live
        if self._late and not self._exchange.has_left(0):
            self._asked = self._ask(0)

    # --- reading -----------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Outside training: take rank 0's buffers if training has changed this rank's since the last time, but not
        what the user has written since."""
        if self._answers:
            self.pause()
            return
        if not self._stale:
            return
        if self._exchange.has_left(0) and not self._exchange.has_mail(Kind.STATE, 0, self._index, TAG_BUFFERS):
            return
        number = 0 if self._exchange.has_left(0) else self._ask(self._passes)
        theirs = self._take(number)
        self._write(theirs, theirs.keys() - self._own())
        self.synchronized()

    def synchronized(self) -> None:
        """They are rank 0's, but for what the user has written."""
        self._stale, self._asked = False, None
        self._dirty.clear()
        self._by_hand.clear()

    def copied(self, module: nn.Module | None = None, memo: dict[int, Any] | None = None) -> None:
        """The model is being saved or copied: also after a failure, with what there is then. ``memo`` has what of
        ``module`` was copied before."""
        if self._answers:
            self._read = True
            return
        if not self._stale:
            return
        try:
            self._exchange.check()
            self.fetch()
        except PoseidonError as error:
            if self._exchange.failure is None:
                raise
            self._stale = False
            log.warning("rank %d: saves its own buffers, not rank 0's: %s", self._exchange.rank, error)
        if module is not None and memo is not None:
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) in memo:
                    memo[id(buffer)].data.copy_(buffer)

    def _own(self) -> set[str]:
        """What the user has loaded, or written to norms, since training wrote it."""
        now, after = dict(self._all()), self._after.items()
        written = {name for name, (b, version) in after if now.get(name) is b and b._version != version}
        return written | self._names(self._by_hand)

    # --- rank 0's answers --------------------------------------------------------------------------------------

    def _on_ask(self, peer: int, number: int, round_: int, passes: int) -> None:
        with self._lock:
            self._waiting[peer] = (number, round_, passes)
        self._answer()

    @torch.no_grad()
    def _answer(self) -> None:
        """Give what can be given now to those who wait for it."""
        with self._lock:
            for peer, (number, round_, passes) in list(self._waiting.items()):
                found = self._at(round_, passes)
                if found is not None:
                    del self._waiting[peer]
                    give_named(self._exchange, self._index, TAG_BUFFERS, found, [peer], number)

    def _at(self, round_: int, passes: int) -> Tensors | None:
        """The buffers as of this place, or soon after; None: this rank has not come there yet."""
        if round_ > self._round:
            return None
        for taken, shot in self._past if round_ == self._round - 1 else ():
            if taken >= passes:
                return shot
        passes = passes if round_ == self._round else 0
        for taken, shot in self._shots:
            if taken >= passes:
                return shot
        if self._running or (passes > self._passes and not self._paused):
            return None
        return dict(self._all())

    def pause(self) -> None:
        """Rank 0 may make no further pass until the others have got what they ask for."""
        if not self._answers or self._paused:
            return
        with self._lock:
            self._read = self._paused = True
            self._running = False
        self._answer()

    def leave(self) -> None:
        """Rank 0 will answer no more."""
        if self._answers and self._exchange.failure is None:
            with self._lock:
                self._waiting.clear()
            give_named(self._exchange, self._index, TAG_BUFFERS, dict(self._all()), self._peers())

    # --- small parts -------------------------------------------------------------------------------------------

    def _ask(self, passes: int) -> int:
        self._questions += 1
        self._exchange.ask(0, self._index, self._questions, self._round, passes)
        return self._questions

    def _take(self, number: int) -> Tensors:
        while True:
            got, tensors = take_named(self._exchange, self._index, TAG_BUFFERS, "buffers")
            if got in (0, number):  # 0: its last ones
                return tensors

    @torch.no_grad()
    def _write(self, theirs: Tensors, names: Collection[str]) -> None:
        for name, buffer in self._all():
            value = theirs.get(name) if name in names else None
            if value is None or buffer.is_meta:
                continue
            if value.shape != buffer.shape:
                raise UserError(
                    f"buffer {name} is {list(value.shape)} on rank 0 and {list(buffer.shape)} on rank "
                    f"{self._exchange.rank}: must have the same shape everywhere"
                )
            buffer.data.copy_(value)  # .data: a backward pass that still needs the old ones must not stumble

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that there are now: a module may have replaced its tensors."""
        for prefix, module in self._holders:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield prefix + key, buffer

    def _names(self, modules: Collection[nn.Module]) -> set[str]:
        return {prefix + key for prefix, module in self._holders if module in modules for key in module._buffers}

    def _marks(self, prefixes: set[str]) -> Marks:
        return {
            prefix + key: (buffer, buffer._version)
            for prefix, module in self._holders
            if prefix in prefixes
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    def _changed(self) -> set[str]:
        """Names of the buffers, norms' left out, that were written or replaced in this round."""
        now = dict(self._all()) if self._before else {}
        before = (self._before or {}).items()
        return {name for name, (b, version) in before if now.get(name, b) is not b or b._version != version}

    def _peers(self) -> range:
        return range(1, self._exchange.world_size)
