"""Servers apart from workers: some nodes, or ranks that only serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.errors import PoseidonError
from tests.matrix import test_structure
from tests.matrix.harness import Case, assert_equals_one_process, build, on_ranks, vectors
from tests.ranks import run_ranks

ROLES: list[int | list[int]] = [1, 3, [0], [1, 2]]


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "project_adam"])
@pytest.mark.parametrize("servers", ROLES, ids=str)
def test_equals_one_process(comm: str, servers: int | list[int]) -> None:
    assert_equals_one_process(mlp(), comm, [2, 4, 3], servers=servers)


@pytest.mark.parametrize("comm", ["ps", "sfb", "project_adam"])
@pytest.mark.parametrize("servers", [2, [1]], ids=str)
def test_with_devices(comm: str, servers: int | list[int]) -> None:
    assert_equals_one_process(mlp(), comm, [2, 3, 1, 2], devices=[2, 2], servers=servers)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [2, [1]], ids=str)
@pytest.mark.parametrize("name", test_structure.CASES)
def test_every_structure(name: str, servers: int | list[int]) -> None:
    assert_equals_one_process(test_structure.CASES[name], "hybrid", [2, 4, 3], servers=servers)


@pytest.mark.parametrize("comm", ["ps", "project_adam"])
@pytest.mark.parametrize("servers", [2, [1]], ids=str)
def test_workers_send_what_is_planned(comm: str, servers: int | list[int]) -> None:
    case = mlp()
    for _, report in on_ranks(case, build(case), comm, [4, 4, 4], servers=servers):
        assert report["bytes_dense_per_iteration"] == pytest.approx(report["bytes_planned_per_iteration"], rel=0.02)
        for row in report["plan"]:
            assert set(row["servers"]) <= ({3, 4} if servers == 2 else {1})


def test_a_worker_that_fails_ends_the_servers() -> None:
    def body(session: Session) -> Any:
        model = nn.Linear(4, 4)
        session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if session.rank == 1:
            raise ValueError("a worker's own mistake")
        try:
            model(torch.ones(2, 4)).sum().backward()
        except PoseidonError as error:
            return str(error)
        return None

    with pytest.raises(ValueError, match="own mistake"):
        run_ranks(2, body, servers=1)


def mlp() -> Case:
    return Case(lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 3)), vectors(64))
