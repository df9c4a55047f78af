"""comm.rule=time in the engine: what it measures, and that all ranks go by what rank 0 made of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.planning import Rates, Timing
from tests.matrix.harness import Case, assert_equals_one_process, vectors
from tests.ranks import run_ranks


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 3))


def steps(session: Session, model: nn.Module, rows: int, rule: str, count: int = 3, sparse: str = "never") -> dict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.distribute(model, optimizer, rule=rule, sparse=sparse)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(rows, model[0].in_features)).square().mean().backward()
        optimizer.step()
    report = session.report(model)
    return {name: report[name] for name in ("schemes", "rates")} | {"digest": session.digest(model)}


@pytest.mark.parametrize(("devices", "servers"), [([1, 1, 1], None), ([1, 2], None), ([2, 2], 1)], ids=str)
def test_what_is_measured_is_the_same_on_all_ranks(devices: list[int], servers: int | None) -> None:
    def body(session: Session) -> dict:
        torch.manual_seed(session.rank)
        return steps(session, mlp(4096), 4, "time")

    first, *others = run_ranks(sum(devices), body, devices=devices, servers=servers)
    assert all(other == first for other in others)
    rates = Rates(**first["rates"])
    assert (rates.source, rates.shared, rates.host) == ("measured", True, None)
    assert min(rates.link / 1e6, rates.multiply / 1e8, (rates.add or 0.0) / 1e7) > 1
    assert 0 < rates.hop < 1


@pytest.mark.parametrize(
    ("rates", "scheme"),
    [
        (Rates(1e6, 0.0, 1e15, source="profile"), "sfb"),  # factors are fewest here
        (Rates(1e15, 0.0, 1e3, source="profile"), "block"),  # a device that can hardly multiply
        (Rates(1e15, 10.0, 1e15, source="profile"), "ps"),  # a hop more, but the biases' two are waited for anyway
        (Rates(1e15, 10.0, 1e15), "sfb"),  # the papers' choice, as nothing is clearly better by measured rates
    ],
    ids=str,
)
def test_known_rates_decide_and_the_gradient_is_exact(rates: Rates, scheme: str) -> None:
    timing = Timing(rates, {"0.weight": 0.0}, {})
    case = Case(mlp, vectors(64), options={"rule": "time", "timing": timing})
    for report in assert_equals_one_process(case, "hybrid", [2, 4, 3]):
        assert {report["schemes"][layer] for layer in ("0", "2")} == {scheme}
        assert report["rates"]["source"] == rates.source


def test_the_papers_rule_measures_nothing() -> None:
    assert [seen["rates"] for seen in run_ranks(2, lambda session: steps(session, mlp(4096), 4, "paper"))] == [None] * 2


def test_layers_too_small_to_matter_cost_no_time_at_start() -> None:
    assert [seen["rates"] for seen in run_ranks(2, lambda session: steps(session, mlp(), 4, "time"))] == [None] * 2


def test_what_coding_depends_on_is_measured_without_products() -> None:
    first, second = run_ranks(2, lambda session: steps(session, mlp(4096), 4, "paper", sparse="auto")["rates"])
    assert first == second
    assert first["multiply"] is first["add"] is None
    assert min(first["link"] / 1e6, first["code"] / 1e6) > 1


def test_one_node_has_nothing_to_choose() -> None:
    seen = run_ranks(2, lambda session: steps(session, mlp(4096), 4, "time"), devices=[2])
    assert [each["rates"] for each in seen] == [None] * 2


@pytest.mark.slow
def test_a_large_layer_on_loopback_does_not_multiply_for_everyone() -> None:
    """4096 x 4096, K = 256, two nodes: SFB moves fewest floats, and multiplies longer than it saves on the wire."""

    def chosen(rule: str) -> list[str]:
        def body(session: Session) -> str:
            torch.manual_seed(0)
            return steps(session, nn.Sequential(nn.Linear(4096, 4096)), 256, rule, 2)["schemes"]["0"]

        return run_ranks(2, body)

    assert chosen("paper") == ["sfb"] * 2
    first, second = chosen("time")
    assert first == second != "sfb"
