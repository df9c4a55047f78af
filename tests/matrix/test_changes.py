"""A model that changes after it was distributed: frozen, unfrozen, replaced parameters; again and again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.errors import UserError
from tests.engine.nets import assert_exact, grads
from tests.matrix.harness import COMMS, SIZES, mean_square, vectors
from tests.ranks import run_ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4))


def unfreeze(model: nn.Module) -> None:
    model.requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model[2].requires_grad_(False)  # type: ignore[index]
    model[2].zero_grad()  # type: ignore[index]


def assign(model: nn.Module) -> None:
    """Other weights on every rank: rank 0's count."""
    state = {name: tensor + torch.rand(()) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_layer(model: nn.Module) -> None:
    model[4] = nn.Linear(30, 4)  # type: ignore[operator]


def move(model: nn.Module) -> None:
    """In place: nothing is replaced."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    model.load_state_dict(model.state_dict())


CHANGES = {
    "unfreeze": unfreeze,
    "freeze": freeze,
    "assign": assign,
    "replace a layer": replace_layer,
    "move": move,
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CHANGES)
def test_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    torch.manual_seed(0)
    base = net()
    if name == "unfreeze":
        base[:4].requires_grad_(False)  # type: ignore[index]
    data = [vectors(6)(torch.Generator().manual_seed(step), sum(sizes))[0] for step in range(6)]
    states: dict[int, dict[str, torch.Tensor]] = {}

    def train(model: nn.Module, mine: slice, distribute: Callable[[Any], None], after: int | None) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        distribute(optimizer)
        seen = []
        for step, x in enumerate(data):
            if step == 3:
                CHANGES[name](model)
                if after is None:  # one process goes on with what rank 0 had
                    model.load_state_dict(states[0])
            if step == 3 and name in ("assign", "replace a layer"):
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            out = model(x[mine])
            if step == 3 and after is not None:
                states[after] = copy.deepcopy(model.state_dict())
            mean_square(out, torch.ones(len(x[mine]))).backward()
            seen.append(grads(model))
            optimizer.step()
        return seen

    def body(session: Session) -> tuple[list[Any], str]:
        model = copy.deepcopy(base)
        first = sum(sizes[: session.rank])
        mine = slice(first, first + sizes[session.rank])
        seen = train(model, mine, lambda optimizer: session.distribute(model, optimizer, comm=comm), session.rank)  # type: ignore[arg-type, func-returns-value]
        return seen, session.digest(model)

    ranks = run_ranks(len(sizes), body)
    want = train(copy.deepcopy(base), slice(None), lambda optimizer: None, None)
    for seen, _ in ranks:
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)
    assert len({digest for _, digest in ranks}) == 1


def test_all_is_frozen_first() -> None:
    base = net().requires_grad_(False)

    def body(session: Session) -> tuple[str, Any]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer, comm="sfb")
        model(torch.ones(2, 6))
        model.requires_grad_(True)
        for _ in range(2):
            model(torch.full((2, 6), session.rank + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return session.digest(model), session.report(model)["schemes"]

    first, second = run_ranks(2, body)
    assert first == second
    assert set(first[1].values()) == {"sfb"}


def test_a_change_on_one_rank_only_is_named() -> None:
    def body(session: Session) -> str:
        model = net()
        model[:4].requires_grad_(False)  # type: ignore[index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer)
        model[2].requires_grad_(True)  # type: ignore[index]
        if session.rank:
            model[0].requires_grad_(True)  # type: ignore[index]
        with pytest.raises(UserError) as raised:
            model(torch.ones(2, 6))
        return str(raised.value)

    said = set(run_ranks(3, body))
    assert len(said) == 1
    assert "ranks differ: parameter 0.weight" in said.pop()


@pytest.mark.parametrize("comm", COMMS)
def test_distribute_undistribute_distribute(comm: str) -> None:
    torch.manual_seed(0)
    base = net()

    def body(session: Session) -> str:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.full((2, 6), session.rank + 1.0)).square().mean().backward()
                optimizer.step()
            session.undistribute(model)
            assert type(model[0]) is nn.Linear  # type: ignore[index]
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        return session.digest(model)

    assert len(set(run_ranks(2, body))) == 1
