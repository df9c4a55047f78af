"""Nodes with several devices: what is computed is one process's; what leaves a node is what one device's would be."""

from __future__ import annotations

import pytest
from torch import nn

from tests.matrix import test_embeddings, test_layers, test_structure, test_techniques
from tests.matrix.harness import Case, assert_equals_one_process, build, on_ranks, vectors

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
@pytest.mark.parametrize("comm", ["ps", "hybrid", "project_adam"])
@pytest.mark.parametrize("name", test_structure.CASES)
def test_structure_by_other_comms(name: str, comm: str) -> None:
    assert_equals_one_process(test_structure.CASES[name], comm, [2, 3, 1, 3], devices=[2, 2])


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "project_adam"])
@pytest.mark.parametrize("devices", [[4], [1, 3], [3, 1], [2, 1, 1]], ids=str)
def test_any_number_of_devices_on_each_node(comm: str, devices: list[int]) -> None:
    """Also a device without rows."""
    assert_equals_one_process(mlp(), comm, [2, 3, 0, 2], devices)


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "project_adam"])
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
        assert all(any(report["plan"][0]["scheme"] == row["scheme"] for row in report["plan"]) for report in reports)
    if comm == "project_adam":  # its owners differ
        sent = [[sum(nodes)] for nodes in sent]
    for nodes in sent[1:]:
        # Flags of merged units, and how KV pairs are cut, differ a little.
        assert nodes == pytest.approx(sent[0], rel=0.05)


def mlp() -> Case:
    return Case(lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 3)), vectors(64))
