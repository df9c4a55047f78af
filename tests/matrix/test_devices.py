"""Nodes with several devices: what is computed is one process's; what leaves a node is what one device's would be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from poseidon.api import Session
from tests.matrix import test_embeddings, test_layers, test_structure, test_techniques
from tests.matrix.harness import Case, assert_equals_one_process, build, on_ranks, vectors
from tests.ranks import run_ranks

CASES = {
    f"{module.__name__.rpartition('_')[2]}: {name}": case
    for module in (test_structure, test_layers, test_embeddings, test_techniques)
    for name, case in module.CASES.items()
}

#: The others are as many again, and differ less in what travels.
FAST = [name for name in CASES if name.startswith("structure")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_equals_one_process(name: str) -> None:
    assert_equals_one_process(CASES[name], "sfb", [2, 3, 1, 3], devices=[2, 2])


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["ps", "hybrid", "block", "project_adam"])
@pytest.mark.parametrize("name", test_structure.CASES)
def test_structure_by_other_comms(name: str, comm: str) -> None:
    assert_equals_one_process(test_structure.CASES[name], comm, [2, 3, 1, 3], devices=[2, 2])


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "block", "project_adam"])
@pytest.mark.parametrize("devices", [[4], [1, 3], [3, 1], [2, 1, 1]], ids=str)
def test_any_number_of_devices_on_each_node(comm: str, devices: list[int]) -> None:
    """Also a device without rows."""
    assert_equals_one_process(mlp(), comm, [2, 3, 0, 2], devices)


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "block", "project_adam"])
def test_bytes_between_nodes_are_planned_and_those_of_one_device(comm: str) -> None:
    """Dense gradients once per node; factors of all rows of the node. Inside it as planned, too."""
    sent = []
    for devices in (1, 2, 4):
        case = mlp()
        ranks = 2 * devices
        reports = [report for _, report in on_ranks(case, build(case), comm, [8 // devices] * ranks, [devices] * 2)]
        for report in reports:
            assert report["bytes_dense_per_iteration"] == pytest.approx(report["bytes_planned_per_iteration"], rel=0.02)
            inside = report["bytes_inside_planned_per_iteration"]
            assert report["bytes_inside_per_iteration"] == pytest.approx(inside, rel=0.02)
        sent.append([sum(r["bytes_dense_per_iteration"] for r in reports[n * devices :][:devices]) for n in range(2)])
        scheme = {"project_adam": "adam", "hybrid": "sfb"}.get(comm, comm)
        assert {row["scheme"] for report in reports for row in report["plan"] if row["param"] == "0.weight"} == {scheme}
    if comm == "project_adam":  # its owners differ
        sent = [[sum(nodes)] for nodes in sent]
    for nodes in sent[1:]:
        # Flags of merged units, and how KV pairs are cut, differ a little.
        assert nodes == pytest.approx(sent[0], rel=0.05)


def test_bytes_sent_are_those_to_other_nodes() -> None:
    def body(session: Session) -> int:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="sfb")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        assert session._exchange is not None
        assert sum(session._exchange.endpoint.counters.sent.values()) > 0
        return session.bytes_sent(model)

    assert run_ranks(2, body, devices=[2]) == [0, 0]
    assert all(run_ranks(4, body, devices=[2, 2]))


@pytest.mark.parametrize("comm", ["ps", "sfb"])
def test_a_rerun_has_the_same_bits(comm: str) -> None:
    case = mlp()
    base = build(case)
    runs = [on_ranks(case, base, comm, [2, 3, 1, 3], [2, 2]) for _ in range(2)]
    for (first, _), (second, _) in zip(*runs, strict=True):
        for step in zip(first, second, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(*step, strict=True))


def mlp() -> Case:
    return Case(lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 3)), vectors(64))
