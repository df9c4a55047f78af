"""Servers apart from workers: some nodes, or ranks that only serve."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from poseidon.api import Session
from poseidon.errors import OutOfStepError, PeerLostError, PoseidonError
from tests.matrix import test_structure
from tests.matrix.harness import Case, assert_equals_one_process, build, on_ranks, vectors
from tests.ranks import run_ranks

ROLES: list[int | list[int]] = [1, 3, [0], [1, 2]]


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "block", "project_adam"])
@pytest.mark.parametrize("servers", ROLES, ids=str)
def test_equals_one_process(comm: str, servers: int | list[int]) -> None:
    assert_equals_one_process(mlp(), comm, [2, 4, 3], servers=servers)


@pytest.mark.parametrize("comm", ["ps", "sfb", "block", "project_adam"])
@pytest.mark.parametrize("servers", [2, [1]], ids=str)
def test_with_devices(comm: str, servers: int | list[int]) -> None:
    assert_equals_one_process(mlp(), comm, [2, 3, 1, 2], devices=[2, 2], servers=servers)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [2, [1]], ids=str)
@pytest.mark.parametrize("name", test_structure.CASES)
def test_every_structure(name: str, servers: int | list[int]) -> None:
    assert_equals_one_process(test_structure.CASES[name], "hybrid", [2, 4, 3], servers=servers)


@pytest.mark.parametrize("comm", ["ps", "block", "project_adam"])
@pytest.mark.parametrize("servers", [2, [1]], ids=str)
def test_workers_send_what_is_planned(comm: str, servers: int | list[int]) -> None:
    case = mlp()
    for _, report in on_ranks(case, build(case), comm, [4, 4, 4], servers=servers):
        assert report["bytes_dense_per_iteration"] == pytest.approx(report["bytes_planned_per_iteration"], rel=0.02)
        for row in report["plan"]:
            assert set(row["servers"]) <= ({3, 4} if servers == 2 else {1})


@pytest.mark.parametrize("comm", ["hybrid", "block", "project_adam"])
@pytest.mark.parametrize("devices", [[1, 1, 1], [2, 2]], ids=str)
def test_servers_send_what_is_planned(comm: str, devices: list[int]) -> None:
    """As the workers see it, who may have it from another device of their node."""
    case = mlp()
    reports = [report for _, report in on_ranks(case, build(case), comm, [4] * sum(devices), devices, servers=2)]
    apart = list(zip(*(report["from_servers"] for report in reports), strict=True))
    assert len(apart) == 2
    for seen in apart:  # of one server by all workers
        assert sum(one["dense"] for one in seen) == pytest.approx(seen[0]["planned"], rel=0.02)
        assert all(one["sent"] > one["dense"] for one in seen if one["dense"])
    assert sum(one["dense"] for seen in apart for one in seen) > 0


def steps(session: Session, count: int, then: Callable[[], object] = lambda: None) -> str | None:
    """So many steps; of what goes wrong the words."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.distribute(model, optimizer, comm="ps")
    try:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        then()
    except PoseidonError as error:
        return str(error)
    return None


def test_a_worker_that_leaves_is_named() -> None:
    """By the server: the other worker only knows that it waits for the server."""
    said: list[str | None] = []
    with pytest.raises(PeerLostError, match=r"rank 1 ended while others still wait for rank 1: push of layer"):
        run_ranks(2, lambda session: said.append(steps(session, 3 - session.rank)), servers=1)
    assert any(words is not None and "rank 1" in words for words in said)


def test_a_silent_worker_is_named_within_the_timeout() -> None:
    silent = threading.Event()
    said: list[str | None] = []

    def body(session: Session) -> None:
        said.append(steps(session, 3 - session.rank, lambda: silent.wait(30) if session.rank else None))
        silent.set()

    with pytest.raises(PeerLostError, match=r"rank 2 waited \d+ s \(comm.timeout\) for rank 1: push of layer"):
        run_ranks(2, body, servers=1, timeout=3.0)
    assert any(words is not None and "for rank 1: push of layer" in words for words in said)


def test_a_worker_in_a_gather_while_another_waits_for_the_server() -> None:
    store = dist.HashStore()
    said: list[str | None] = []

    def body(session: Session) -> None:
        session._store = store
        session._exchange.elsewhere = session._elsewhere  # type: ignore[union-attr]
        said.append(steps(session, 3 - session.rank, session.barrier))

    with pytest.raises(OutOfStepError, match=r"rank 0 waits for rank 2: .*, but rank 1 is in session.gather\(\)"):
        run_ranks(2, body, servers=1)
    assert len(said) == 2
    assert all(words is not None and "but rank 1 is in session.gather()" in words for words in said)


def test_different_numbers_of_backward_passes_are_told_with_the_remedy() -> None:
    def body(session: Session) -> str | None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer)
        try:
            for step in range(4):
                for _ in range(2 if session.rank and step == 2 else 1):
                    model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        except PoseidonError as error:
            return str(error)
        return None

    with pytest.raises(OutOfStepError, match=r"session.no_sync\(\)"):
        run_ranks(2, body, servers=1)


def test_leaving_by_join_and_other_parameters_on_the_way() -> None:
    def body(session: Session) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        model[0].requires_grad_(True)
        with session.join():
            for _ in range(2 + 2 * session.rank):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        return session.digest(model)

    assert len(set(run_ranks(3, body, servers=2))) == 1
    assert len(set(run_ranks(4, body, devices=[2, 2]))) == 1


def mlp() -> Case:
    return Case(lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 3)), vectors(64))
