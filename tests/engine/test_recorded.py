"""A recorded plan at work: the same bits again, and on every rank the same error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.errors import UserError
from poseidon.planning import Rates, Timing
from tests.ranks import run_ranks


class Net(nn.Module):
    """Args:
    twice: the inner weight is also used elsewhere, so that its gradient is more than a product of factors.
    """

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.twice = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 5), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.tanh(self.inner(self.first(x))))
        return y + self.inner.weight.square().sum() if self.twice else y


def train(session: Session, twice: bool = False, **options: Any) -> dict:
    generator = torch.Generator().manual_seed(session.rank)  # ranks are threads: the global one is everybody's
    model = Net(twice)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.distribute(model, optimizer, **options)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 32, generator=generator)).square().mean().backward()
        optimizer.step()
    report = session.report(model)
    return {"plan": report["plan"], "schemes": report["schemes"], "digest": session.digest(model)}


@pytest.mark.parametrize(("multiply", "scheme"), [(1e15, "sfb"), (1e3, "block")])
def test_what_one_run_recorded_another_repeats_bit_for_bit(multiply: float, scheme: str, tmp_path: Path) -> None:
    rates = Rates(1e6 if scheme == "sfb" else 1e15, 0.0, multiply)
    timing = Timing(rates, {"last.weight": 0.0}, {})
    first = run_ranks(2, lambda session: train(session, timing=timing))
    assert {run["schemes"]["inner"] for run in first} == {scheme}
    path, content = tmp_path / "plan.json", first[0]["plan"]
    path.write_text(json.dumps(content))
    # Only rank 0 has to have the file.
    again = run_ranks(2, lambda session: train(session, plan=path if session.rank == 0 else "elsewhere"))
    assert [run["digest"] for run in again] == [run["digest"] for run in first]
    assert again == run_ranks(2, lambda session: train(session, plan=content, rule="paper"))
    other = run_ranks(2, lambda session: train(session, comm="ps"))
    assert other[0]["digest"] != first[0]["digest"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"param": "other.weight"}, "is of another model: it has no inner.weight"),
        ({"scheme": "rows"}, "inner.weight .Linear. cannot go by rows"),
        ({}, "inner.weight cannot go by sfb: in the first iteration its gradient was not"),
    ],
    ids=["other", "rows", "twice"],
)
def test_a_plan_that_does_not_fit_is_refused_on_every_rank(edit: dict, words: str) -> None:
    plan = run_ranks(2, lambda session: train(session, rule="paper"))[0]["plan"]
    plan = [row | ({"scheme": "sfb"} | edit if row["param"] == "inner.weight" else {}) for row in plan]

    def body(session: Session) -> str:
        with pytest.raises(UserError, match=words) as error:
            train(session, twice=True, plan=plan)
        return str(error.value)

    first, second = run_ranks(2, body)
    assert first == second


def test_only_hybrid_replays() -> None:
    def body(session: Session) -> None:
        with pytest.raises(UserError, match=r"^plan= replays what comm='hybrid' chose; with comm='ps' leave it out"):
            train(session, comm="ps", plan=[])

    run_ranks(2, body)
