"""What the exchange says, and to whom, when something goes wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.engine import exchange as module
from poseidon.engine.exchange import Exchange
from poseidon.errors import PeerLostError, PoseidonError
from poseidon.transport import Header, Kind, inproc_mesh
from poseidon.transport.faults import Fault, FaultyEndpoint
from tests.ranks import run_ranks

LIMIT = 10.0


@pytest.fixture
def exchanges(request) -> Iterator[list[Exchange]]:
    """Three ranks' exchanges over the in-process transport; the timeout may be given as a parameter."""
    timeout = getattr(request, "param", LIMIT)
    result = [Exchange(endpoint, timeout) for endpoint in inproc_mesh(3)]
    yield result
    for exchange in result:
        exchange.close()


def settled(exchange: Exchange) -> None:
    """All that its thread had to do so far is done."""
    done = threading.Event()
    exchange.endpoint.post(done.set)
    assert done.wait(LIMIT)


def failure(exchange: Exchange) -> PoseidonError:
    """The error with which this rank ends."""
    with pytest.raises(PoseidonError) as caught:
        exchange.receive(Kind.TEXT, (exchange.rank + 1) % 3, 0, 99, "something")
    return caught.value


def everywhere(exchanges: list[Exchange], call: Callable[[Exchange], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return [f.result(2 * LIMIT) for f in [pool.submit(call, exchange) for exchange in exchanges]]


class Broken:
    def on_message(self, header: Header, payload: memoryview) -> None:
        raise IndexError("tuple index out of range")


def push(exchange: Exchange, peer: int, payload: bytes = b"abcd", **fields: int) -> None:
    header = Header(Kind.PUSH, exchange.rank, **fields)
    exchange.endpoint.post(lambda: exchange.send(peer, header, payload))


def test_an_unusable_message_ends_the_run_by_name(exchanges):
    exchanges[1].open(0, 0, Broken())
    push(exchanges[2], 1, unit=5, round=3)
    errors = everywhere(exchanges, failure)
    assert "rank 1: cannot use PUSH from rank 2 (unit 5, round 3): IndexError: tuple index out of range" in str(
        errors[1]
    )
    assert not isinstance(errors[1], PeerLostError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        assert "IndexError" in str(error)


def test_an_early_message_that_is_unusable_too(exchanges):
    push(exchanges[2], 1)
    settled(exchanges[2])
    settled(exchanges[1])
    exchanges[1].open(0, 0, Broken())
    assert "IndexError" in str(failure(exchanges[1]))


@pytest.mark.parametrize("payload", [b"", b"\0", b"\1\0\xff\xfe"])
def test_a_mangled_abort_still_ends_the_run(exchanges, payload):
    exchanges[2].endpoint.post(lambda: exchanges[2].endpoint.send(0, Header(Kind.ABORT, 2), payload, urgent=True))
    assert failure(exchanges[0])


def test_a_posted_call_that_raises_ends_the_run(exchanges):
    exchanges[1].endpoint.post(lambda: 1 / 0)
    errors = everywhere(exchanges, failure)
    assert "rank 1: communication failed: ZeroDivisionError" in str(errors[1])
    assert [getattr(e, "rank", None) for e in errors] == [1, None, 1]


def test_a_lost_peer_ends_all_and_all_name_it(exchanges):
    """Ranks 0 and 1 notice at different times, and rank 1's own end is no new culprit."""
    exchanges[0].endpoint.lose(2, "reset")
    first = failure(exchanges[0])
    second = failure(exchanges[1])
    exchanges[1].endpoint.lose(0, "reset")  # rank 0 has ended because of rank 2
    settled(exchanges[1])
    assert failure(exchanges[1]) is second
    for error in (first, second):
        assert isinstance(error, PeerLostError)
        assert error.rank == 2
        assert "rank 2 was lost: reset" in str(error)


def test_who_is_given_up_on_blames_nobody_else(exchanges):
    """It is alive after all: it learns why the others ended instead of finding them dead."""
    exchanges[0].fail(PeerLostError(2, "rank 0 waited 9 s (comm.timeout) for rank 2: push of layer x"))
    error = failure(exchanges[2])
    assert not isinstance(error, PeerLostError)
    assert "rank 2: the other ranks gave up on this one: rank 0 waited 9 s" in str(error)


def test_a_peer_that_left_while_someone_waits(exchanges):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(exchanges[0].hear, 2, 0, 7, "plan")
        exchanges[2].close()
        with pytest.raises(PeerLostError, match="rank 2 ended while rank 0 still waits for its plan") as caught:
            waiting.result(LIMIT)
    assert caught.value.rank == 2
    other = failure(exchanges[1])
    assert isinstance(other, PeerLostError)
    assert other.rank == 2


def test_a_peer_that_left_before_the_wait_began(exchanges):
    exchanges[2].close()
    settled(exchanges[0])
    with pytest.raises(PeerLostError, match="rank 2 ended while rank 0 still waits for its plan"):
        exchanges[0].hear(2, 0, 7, "plan")


def test_what_a_peer_sent_before_it_left_still_counts(exchanges):
    exchanges[2].say(0, 0, 7, "hello")
    exchanges[2].close()
    settled(exchanges[0])
    assert exchanges[0].hear(2, 0, 7, "greeting") == "hello"
    exchanges[0].check()


def test_loss_after_a_goodbye_is_none(exchanges):
    exchanges[2].close()
    settled(exchanges[0])
    exchanges[0].on_lost(2, "reset")
    exchanges[0].check()


def test_check_for(exchanges):
    exchanges[0].check_for(2, "its value", lambda: False)
    exchanges[2].close()
    settled(exchanges[0])
    exchanges[0].check_for(2, "value", lambda: True)
    with pytest.raises(PeerLostError, match="rank 2 ended while rank 0 still waits for its value"):
        exchanges[0].check_for(2, "value", lambda: False)


@pytest.mark.parametrize("exchanges", [0.3], indirect=True)
def test_timeout_names_everything(exchanges):
    with pytest.raises(PeerLostError, match=r"rank 0 waited 0 s \(comm\.timeout\) for rank 2: plan") as caught:
        exchanges[0].hear(2, 0, 7, "plan")
    assert caught.value.rank == 2


@pytest.mark.parametrize("exchanges", [0.5], indirect=True)
def test_who_waits_for_a_server_lets_the_server_speak_first(exchanges):
    """Rank 1 waits for rank 2's push; rank 0 for rank 1's answer, since a little longer. The culprit is rank 2."""

    def wait(exchange: Exchange, missing: list[tuple[str, int]]) -> PeerLostError:
        queue: SimpleQueue[Any] = SimpleQueue()
        exchange.watch(queue)
        with pytest.raises(PeerLostError) as caught:
            exchange.take(queue, lambda: missing)
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        second_hand = pool.submit(wait, exchanges[0], [("pull of layer x", 1)])
        settled(exchanges[0])
        direct = pool.submit(wait, exchanges[1], [("pull of layer y", 0), ("push of layer x", 2)])
        for future in (second_hand, direct):
            assert future.result(LIMIT).rank == 2
            assert "for rank 2: push of layer x" in str(future.result())


@pytest.mark.parametrize("exchanges", [0.3], indirect=True)
def test_a_silent_server_is_named_in_the_end(exchanges):
    queue: SimpleQueue[Any] = SimpleQueue()
    with pytest.raises(PeerLostError, match="for rank 1: pull of layer x") as caught:
        exchanges[0].take(queue, lambda: [("pull of layer x", 1)])
    assert caught.value.rank == 1


@pytest.mark.parametrize("exchanges", [1.0], indirect=True)
def test_silence_is_reported(exchanges, monkeypatch, caplog):
    monkeypatch.setattr(module, "WARN_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING, "poseidon"), pytest.raises(PeerLostError):
        exchanges[0].hear(1, 0, 7, "plan")
    warnings = [r.getMessage() for r in caplog.records if "has waited" in r.getMessage()]
    assert len(warnings) >= 3
    assert warnings[0].startswith("rank 0: has waited 0 s for rank 1: plan")


def test_a_dead_thread_does_not_hang_its_rank(exchanges, monkeypatch):
    """Nothing that is posted runs any more; the failure is noticed all the same."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(exchanges[0].endpoint, "post", lambda call: None)
    exchanges[0].on_error(OSError("socket gone"))
    assert "rank 0: communication failed: OSError: socket gone" in str(failure(exchanges[0]))


def test_what_comes_for_a_closed_plan_is_dropped(exchanges):
    exchanges[1].open(0, 0, Broken())
    exchanges[1].shut(0, 0)
    settled(exchanges[1])
    push(exchanges[2], 1)
    settled(exchanges[2])
    settled(exchanges[1])
    exchanges[1].check()
    assert not exchanges[1]._early


def test_interrupt_while_waiting_leaves_a_usable_exchange(exchanges):
    class Interrupted(SimpleQueue):
        def get(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exchanges[0].take(Interrupted(), list)
    exchanges[1].say(0, 0, 7, "hello")
    assert exchanges[0].hear(1, 0, 7, "greeting") == "hello"


# --- faults, with engines --------------------------------------------------------------------------------------


def train(steps: int = 3) -> Callable[[Session], Any]:
    def body(session: Session) -> Any:
        random = torch.Generator().manual_seed(session.rank)  # the global one is shared by all ranks' threads
        model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20))
        for p in model.parameters():
            nn.init.normal_(p, std=0.1, generator=random)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            session.distribute(model, optimizer, comm="ps", merge_bytes=256)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(4, 40, generator=random)).sum().backward()
                optimizer.step()
        except PoseidonError as error:
            return error
        return session.digest(model)

    return body


def run_with(faults: dict[int, list[Fault]], world: int = 3, timeout: float = 20.0, kill: bool = False):
    """Results by rank, and the faulty endpoints by rank."""
    made: dict[int, FaultyEndpoint] = {}

    def wrap(inner: Any) -> Any:
        def die() -> None:
            for peer in inner._peers:
                if peer is not inner:
                    peer.lose(inner.rank, "its connection was closed without a goodbye")

        made[inner.rank] = FaultyEndpoint(inner, faults.get(inner.rank, []), die)
        return made[inner.rank]

    return run_ranks(world, train(), wrap=wrap, timeout=timeout), made


def test_without_faults_replicas_agree():
    results, _ = run_with({})
    assert len(set(results)) == 1


def test_a_dropped_push_ends_the_run_naming_its_sender():
    fault = Fault("drop", Kind.PUSH, nth=3, peer=0)
    results, made = run_with({1: [fault]}, timeout=1.0)
    assert made[1].hits[fault] == 1
    for rank, error in enumerate(results):
        assert isinstance(error, PoseidonError), error
        assert "rank 0 waited 1 s (comm.timeout) for rank 1: push of layer" in str(error)
        assert "iteration" in str(error)
        assert getattr(error, "rank", None) == (None if rank == 1 else 1)


def test_a_corrupt_push_is_a_strangers_and_never_arrives():
    results, made = run_with({2: [Fault("corrupt", Kind.PUSH, nth=2, peer=1)]}, timeout=1.0)
    assert made[1].counters.stranger_frames == 1
    assert made[0].counters.stranger_frames == 0
    assert all("for rank 2: push of layer" in str(error) for error in results)


def test_delays_change_no_bit():
    clean, _ = run_with({})
    slow = [Fault("delay", kind, nth=1, times=3, seconds=0.05) for kind in (Kind.PUSH, Kind.PULL)]
    results, made = run_with({1: slow})
    assert results == clean
    assert all(made[1].hits[fault] == 3 for fault in slow)


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL, Kind.TEXT])
def test_a_killed_rank_is_named_by_all_others(kind):
    results, _ = run_with({1: [Fault("kill", kind)]}, timeout=5.0)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerLostError), results[rank]
        assert results[rank].rank == 1
        assert "rank 1 was lost: its connection was closed without a goodbye" in str(results[rank])
