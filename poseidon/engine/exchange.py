"""Between the training thread and the endpoint's thread: routing, waiting, diagnosis, and the word about losses.

Everything named ``_on_...`` or run through ``endpoint.post`` happens in the endpoint's thread. The training
thread only posts, and waits on queues, always with a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from poseidon.engine.coder import Coder
from poseidon.errors import OutOfStepError, PeerLostError, PoseidonError, UserError
from poseidon.planning import Topology
from poseidon.tracing import Tracer
from poseidon.transport import Endpoint, Header, Kind

log = logging.getLogger("poseidon")

#: Silence after which a wait says what it waits for.
WARN_SECONDS = 30.0
#: How often a wait looks whether a peer has left in the meantime.
POLL_SECONDS = 1.0
#: A server that has not answered may itself wait for a third rank, and then says so when its own time is up.
#: Who waits for a server's answer alone gives it this much longer (share of the timeout, and seconds).
PATIENCE, PATIENCE_SECONDS = 0.1, 1.0
#: How the description of such an answer begins.
SECOND_HAND = "pull"
_RANK = struct.Struct("<H")
#: Stands in an abort for the lost rank when none is: all made the mistake together.
NOBODY = 0xFFFF
#: Mailbox tag of the word that a rank is through with its steps (session.join()).
TAG_THROUGH = 6

_BESIDE_ROUNDS = frozenset({Kind.BYE, Kind.ABORT, Kind.ASK, Kind.TEXT, Kind.STATE})

TrafficKey = tuple[int, int, int, Kind, int]


class Traffic:
    """Payload bytes and messages by (model, plan, unit, kind, peer); written in the endpoint's thread."""

    def __init__(self) -> None:
        self.sent: Counter[TrafficKey] = Counter()
        self.dense: Counter[TrafficKey] = Counter()  # what was sent, before it was coded
        self.received: Counter[TrafficKey] = Counter()
        self.messages: Counter[TrafficKey] = Counter()  # sent
        self.arrived: Counter[TrafficKey] = Counter()  # messages

    @staticmethod
    def key(header: Header, peer: int) -> TrafficKey:
        return (header.model, header.plan, header.unit, header.kind, peer)


class Receiver(Protocol):
    """A distributed model's part of the exchange."""

    def on_message(self, header: Header, payload: memoryview) -> None: ...

    def on_through(self, rank: int) -> None:
        """`rank` has made all its steps, and only goes along."""


class Exchange:
    """Handler of one endpoint, shared by all models of a session."""

    def __init__(self, endpoint: Endpoint, timeout: float, topology: Topology | None = None) -> None:
        self.endpoint = endpoint
        self.topology = topology or Topology.flat(endpoint.world_size)
        self.rank = endpoint.rank
        self.world_size = len(self.topology.workers)  # ranks beyond them only serve
        self.timeout = timeout
        self.failure: PoseidonError | None = None
        self.traffic = Traffic()
        self.tracer: Tracer | None = None  # of what plans do that are made from now on
        self.coder = Coder(
            lambda call, what: endpoint.post(partial(self.guarded, call, what)),
            partial(self.broken, what="the coding of factors"),
        )
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._shut: set[tuple[int, int]] = set()
        self._early: dict[tuple[int, int], list[tuple[Header, memoryview]]] = defaultdict(list)
        self._mail: dict[tuple[Kind, int, int, int], SimpleQueue[Any]] = {}
        self._asked: dict[int, Callable[[int, int, int, int], None]] = {}
        #: tells where else a rank waits for this one, if it does: neither would ever go on
        self.elsewhere: Callable[[int], str | None] | None = None
        self.joins = 0  # made so far by this rank
        self._through: dict[int, int] = {}  # by rank, its join that it is in, or was in last
        self._waiting: set[SimpleQueue[Any]] = set()
        self._byes: Counter[int] = Counter()
        self._left: set[int] = set()
        endpoint.start(self)

    # --- endpoint's thread -------------------------------------------------------------------------------------

    def on_message(self, header: Header, payload: memoryview) -> None:
        try:
            if header.kind in _BESIDE_ROUNDS:
                self._route(header, payload)
            else:
                self._deliver(header, payload)
        except Exception as error:
            self._failed(error, f"cannot use {_what(header)}")

    def _deliver(self, header: Header, payload: memoryview) -> None:
        """A part of a round."""
        key, counted = (header.model, header.plan), Traffic.key(header, header.rank)
        self.traffic.received[counted] += header.length
        self.traffic.arrived[counted] += 1
        if key in self._receivers:
            self._receivers[key].on_message(header, payload)
        elif key not in self._shut:
            self._early[key].append((header, payload))

    def _route(self, header: Header, payload: memoryview) -> None:
        match header.kind:
            case Kind.BYE:
                # One on each of the two connections: all that was sent before has arrived after both.
                self._byes[header.rank] += 1
                if self._byes[header.rank] == 2:
                    self._left.add(header.rank)
                    self._wake()
            case Kind.ABORT:
                self._on_abort(_RANK.unpack_from(payload)[0], str(payload[_RANK.size :], "utf-8", "replace"))
            case Kind.ASK:
                if header.model in self._asked:
                    self._asked[header.model](header.rank, header.k, header.round, header.step)
            case Kind.TEXT if header.unit == TAG_THROUGH:
                self._through[header.rank] = header.k
                self._box(header.kind, header.model, header.unit, header.rank).put((header, payload))
                for receiver in self._receivers.values():
                    receiver.on_through(header.rank)
            case Kind.TEXT | Kind.STATE:
                self._box(header.kind, header.model, header.unit, header.rank).put((header, payload))

    def _on_abort(self, lost: int, text: str) -> None:
        """A peer ended the run because of `lost`. If that is this rank, it was slow or misunderstood, not dead."""
        if lost == NOBODY:
            kind = OutOfStepError if text.startswith(OutOfStepError.BEGINNING) else UserError
            self._fail(kind(text), tell=False)
        elif lost == self.rank:
            self._fail(PoseidonError(f"rank {self.rank}: the other ranks gave up on this one: {text}"), tell=False)
        else:
            self._fail(PeerLostError(lost, text), tell=False)

    def _box(self, kind: Kind, model: int, tag: int, peer: int) -> SimpleQueue[Any]:
        # setdefault: both threads may be the first to ask for a box.
        return self._mail.setdefault((kind, model, tag, peer), SimpleQueue())

    def guarded(self, call: Callable[[], None], what: str) -> None:
        """An error in the endpoint's thread ends the run, by name; it must not end the thread in silence."""
        try:
            call()
        except Exception as error:
            self._failed(error, what)

    def _failed(self, error: Exception, what: str) -> None:
        self._fail(error if isinstance(error, PoseidonError) else _named(self.rank, what, error))

    def on_lost(self, rank: int, reason: str) -> None:
        if rank not in self._left:
            self._fail(PeerLostError(rank, f"rank {rank} was lost: {reason}"))

    def on_error(self, error: Exception) -> None:
        self._fail(_named(self.rank, "communication failed", error))

    def _wake(self) -> None:
        for queue in self._waiting:
            queue.put(None)

    def _fail(self, error: PoseidonError, tell: bool = True) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._wake()
        if not tell:
            return
        payload = _RANK.pack(self._lost(error)) + str(error).encode()
        for peer in range(self.endpoint.world_size):
            if peer != self.rank:
                # Also to the lost one: if it lives, it must not find somebody else to blame.
                try:
                    self.endpoint.send(peer, Header(Kind.ABORT, self.rank), payload, urgent=True)
                except Exception as problem:
                    log.warning("rank %d: cannot tell rank %d of the failure: %s", self.rank, peer, problem)

    def _lost(self, error: PoseidonError) -> int:
        if isinstance(error, UserError):
            return NOBODY
        return error.rank if isinstance(error, PeerLostError) else self.rank

    def send(self, peer: int, header: Header, payload: Any, priority: int = 0) -> None:
        """Endpoint's thread only; counts payload bytes. `priority`: as in :meth:`Endpoint.send`."""
        length = 0 if payload is None else memoryview(payload).nbytes
        key = Traffic.key(header, peer)
        self.traffic.sent[key] += length
        self.traffic.dense[key] += header._replace(length=length).dense_length
        self.traffic.messages[key] += 1
        self.endpoint.send(peer, header, payload, priority=priority)

    def through(self) -> list[int]:
        """Endpoint's thread: the ranks that only go along in the present loop."""
        return [rank for rank, join in self._through.items() if join == self.joins]

    # --- training thread ---------------------------------------------------------------------------------------

    def open(self, model: int, plan: int, receiver: Receiver) -> None:
        """From now on `receiver` gets what comes for this plan, and first what came too early."""

        def install() -> None:
            self._receivers[model, plan] = receiver
            for header, payload in self._early.pop((model, plan), ()):
                self.guarded(partial(receiver.on_message, header, payload), f"cannot use {_what(header)}")

        self.endpoint.post(install)

    def shut(self, model: int, plan: int) -> None:
        """What still comes for this plan is dropped."""

        def remove() -> None:
            self._receivers.pop((model, plan), None)
            self._early.pop((model, plan), None)
            self._shut.add((model, plan))

        self.endpoint.post(remove)

    def watch(self, queue: SimpleQueue[Any]) -> None:
        """Wake whoever takes from `queue` when the run fails or a peer leaves."""

        def add() -> None:
            self._waiting.add(queue)
            if self.failure is not None:
                queue.put(None)

        self.endpoint.post(add)

    def unwatch(self, queue: SimpleQueue[Any]) -> None:
        self.endpoint.post(lambda: self._waiting.discard(queue))

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def take(self, queue: SimpleQueue[Any], waits_for: Callable[[], Sequence[tuple[str, int]]]) -> Any:
        """The next item of a watched queue.

        Args:
            waits_for: (what, rank) pairs still missing, for warnings and errors.

        Raises:
            PeerLostError: a rank was lost, or left, or stayed silent for `timeout` seconds.
        """
        start = time.monotonic()
        warn, end = start + WARN_SECONDS, start + self.timeout
        while True:
            now = time.monotonic()
            with contextlib.suppress(Empty):
                item = queue.get(timeout=max(0.0, min(POLL_SECONDS, warn - now, end - now)))
                if item is not None:
                    return item
            if not queue.empty():
                continue
            self.check()
            self._check_elsewhere(waits_for())
            now = time.monotonic()
            if self._left:
                missing = waits_for()
                if queue.empty():
                    self._check_left(missing)
            if now >= end:
                end = self._give_up(waits_for(), start, now)
            if now >= warn:
                log.warning("rank %d: has waited %.0f s for %s", self.rank, now - start, _text(waits_for()))
                warn = now + WARN_SECONDS

    def _check_elsewhere(self, missing: Sequence[tuple[str, int]]) -> None:
        for what, rank in missing:
            # A rank that only serves waits for any worker.
            others = (rank,) if self.topology.works(rank) else self.topology.workers
            for other in others if self.elsewhere is not None else ():
                where = self.elsewhere(other) if other != self.rank else None  # type: ignore[misc]
                if where is not None:
                    text = f"rank {self.rank} waits for rank {rank}: {what}, but rank {other} {where}"
                    self.fail(OutOfStepError(f"{OutOfStepError.BEGINNING}: {text}"))
                    self.check()

    def _check_left(self, missing: Sequence[tuple[str, int]]) -> None:
        for what, rank in missing:
            if rank in self._left:
                self.fail(PeerLostError(rank, f"rank {rank} ended while rank {self.rank} still waits for its {what}"))
                self.check()

    def check_for(self, rank: int, what: str, came: Callable[[], bool]) -> None:
        """For waits elsewhere than in `take`: raises when the run has failed, or `rank` left and owes `what`."""
        self.check()
        if rank in self._left and not came():
            self._check_left([(what, rank)])

    def _give_up(self, missing: Sequence[tuple[str, int]], start: float, now: float) -> float:
        """Raise, or return a new deadline if the culprit may be somebody whom only a server knows."""
        direct = [(what, rank) for what, rank in missing if not what.startswith(SECOND_HAND)]
        patience = max(PATIENCE_SECONDS, PATIENCE * self.timeout)
        if missing and not direct and now < start + self.timeout + patience:
            return start + self.timeout + patience
        shown = [*direct, *(entry for entry in missing if entry not in direct)]
        rank = shown[0][1] if shown else self.rank
        self.fail(PeerLostError(rank, f"rank {self.rank} waited {now - start:.0f} s (comm.timeout) for {_text(shown)}"))
        self.check()
        return now

    def fail(self, error: PoseidonError) -> None:
        """End the run for everyone; from the training thread."""
        done: SimpleQueue[bool] = SimpleQueue()
        self.endpoint.post(lambda: (self._fail(error), done.put(True))[1])  # type: ignore[func-returns-value]
        try:
            done.get(timeout=5)
        except Empty:
            self.failure = self.failure or error

    def broken(self, error: Exception, what: str = "copies between the device and its host") -> None:
        """End the run for everyone, as a thread that works for the endpoint has failed; from any thread."""
        self.endpoint.post(partial(self._fail, _named(self.rank, f"{what} failed", error)))

    def answer(self, model: int, call: Callable[[int, int, int, int], None]) -> None:
        """From now on ``call(rank, number, round, passes)`` runs, in the endpoint's thread, when a rank asks for this
        model's buffers as of so many rounds and forward passes; ``number`` is its question's."""
        self._asked[model] = call

    def ask(self, peer: int, model: int, number: int, round_: int, passes: int) -> None:
        header = Header(Kind.ASK, self.rank, model, round=round_, k=number, step=passes)
        self.endpoint.post(partial(self.endpoint.send, peer, header))

    def say(self, peer: int, model: int, tag: int, text: str, k: int = 0) -> None:
        """Send a text to a peer's mailbox."""
        data = text.encode()
        self.endpoint.post(
            lambda: self.endpoint.send(peer, Header(Kind.TEXT, self.rank, model, unit=tag, k=k), data, urgent=True)
        )

    def hear(self, peer: int, model: int, tag: int, what: str) -> str:
        """Wait for a peer's text."""
        return str(self.receive(Kind.TEXT, peer, model, tag, what)[1], "utf-8")

    def collect(self, queue: SimpleQueue[Any], model: int, tag: int) -> None:
        """From now on all workers' texts under this address come to one queue, as (header, payload)."""

        def install() -> None:
            for peer in range(self.world_size):
                key = (Kind.TEXT, model, tag, peer)
                early = self._mail.get(key)
                self._mail[key] = queue
                while early is not None and early is not queue and not early.empty():
                    item = early.get_nowait()
                    if isinstance(item, tuple):
                        queue.put(item)

        self.endpoint.post(install)

    def receive(self, kind: Kind, peer: int, model: int, tag: int, what: str) -> tuple[Header, memoryview]:
        queue = self._box(kind, model, tag, peer)
        self.watch(queue)
        try:
            item: tuple[Header, memoryview] = self.take(queue, lambda: [(what, peer)])
            return item
        finally:
            self.unwatch(queue)

    def has_left(self, rank: int) -> bool:
        return rank in self._left

    def has_mail(self, kind: Kind, peer: int, model: int, tag: int) -> bool:
        queue = self._mail.get((kind, model, tag, peer))
        return queue is not None and not queue.empty()

    def empty(self, kind: Kind, peer: int, model: int, tag: int) -> None:
        """Everything that was to come under this address has been received."""
        self._mail.pop((kind, model, tag, peer), None)

    def close(self, timeout: float = 5.0) -> None:
        """Say goodbye and free the endpoint."""
        for peer in range(self.endpoint.world_size):
            if peer != self.rank and self.failure is None:
                bye = Header(Kind.BYE, self.rank)
                self.endpoint.post(partial(self.endpoint.send, peer, bye))
                self.endpoint.post(partial(self.endpoint.send, peer, bye, urgent=True))
        self.endpoint.close(timeout if self.failure is None else 1.0)
        self.coder.close()


def _named(rank: int, what: str, error: Exception) -> PoseidonError:
    return PoseidonError(f"rank {rank}: {what}: {type(error).__name__}: {error}")


def _what(header: Header) -> str:
    return f"{header.kind.name} from rank {header.rank} (unit {header.unit}, round {header.round})"


def _text(missing: Sequence[tuple[str, int]]) -> str:
    if not missing:
        return "its peers"
    shown = ", ".join(f"rank {rank}: {what}" for what, rank in missing[:4])
    return shown + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
