"""Ranks with different numbers of steps, under session.join()."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.errors import PeerLostError, UserError
from tests.matrix.harness import COMMS, mean_square
from tests.matrix.test_agreement import same
from tests.ranks import run_ranks

join_module = sys.modules["poseidon.engine.join"]  # the package has a function of this name


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 4))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 4))


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3 + rank, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("accumulate", [1, 2], ids=["", "two backward passes"])
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("steps", [(3, 5), (5, 3), (4, 4), (0, 3), (2, 6, 4)], ids=str)
def test_equals_one_process_on_the_rows_that_are_left(steps: tuple[int, ...], comm: str, accumulate: int) -> None:
    torch.manual_seed(0)
    base = plain()
    alone, optimizer = copy.deepcopy(base), None
    optimizer = sgd(alone)
    for step in range(max(steps)):
        optimizer.zero_grad()
        x = torch.cat([rows(rank, step) for rank, its in enumerate(steps) if step < its])
        for _ in range(accumulate):
            mean_square(alone(x), torch.ones(len(x))).backward()
        optimizer.step()

    def body(session: Session) -> tuple[Any, Any]:
        model = copy.deepcopy(base)
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        with session.join():
            for step in range(steps[session.rank]):
                optimizer.zero_grad()
                x = rows(session.rank, step)
                for _ in range(accumulate):
                    mean_square(model(x), torch.ones(len(x))).backward()
                optimizer.step()
        return model.state_dict(), optimizer.state_dict()["state"]

    first, *others = run_ranks(len(steps), body)
    assert all(same(other, first) for other in others)
    torch.testing.assert_close(first[0], alone.state_dict(), rtol=1e-4, atol=1e-6)


def test_training_goes_on_afterwards() -> None:
    torch.manual_seed(0)
    base = net()

    def body(session: Session) -> str:
        model = copy.deepcopy(base)
        optimizer = sgd(model)
        session.distribute(model, optimizer)
        for epoch in range(3):
            with session.join():
                for step in range(2 + (session.rank + epoch) % 3):
                    optimizer.zero_grad()
                    model(rows(session.rank, step)).square().mean().backward()
                    optimizer.step()
            model.eval()
            model(torch.ones(2, 6))
            model.train()
        return session.digest(model)

    assert len(set(run_ranks(3, body))) == 1


def test_nobody_goes_along_with_what_begins_after_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    base, begun, go_along = net(), threading.Event(), join_module._go_along

    def late(exchange: Any, engines: Any, through: Any) -> bool:
        """Rank 0 looks around again only once others have gone on to the next step, if they can."""
        if exchange.rank == 0 and engines[0].round == 3 and not exchange.joins:
            begun.wait(1)
        return go_along(exchange, engines, through)

    monkeypatch.setattr(join_module, "_go_along", late)

    def body(session: Session) -> str:
        model = copy.deepcopy(base)
        optimizer = sgd(model)
        session.distribute(model, optimizer, overlap="none")
        with session.join():
            for step in range(3 if session.rank else 1):
                optimizer.zero_grad()
                model(rows(session.rank, step)).square().mean().backward()
                optimizer.step()
        optimizer.zero_grad()
        loss = model(rows(session.rank, 9)).square().mean()
        if session.rank == 2:
            threading.Timer(0.2, begun.set).start()  # while this backward pass waits for rank 0
        loss.backward()
        optimizer.step()
        return session.digest(model)

    assert len(set(run_ranks(3, body))) == 1


def test_two_models() -> None:
    torch.manual_seed(0)
    first, second = plain(), plain()

    def body(session: Session) -> tuple[str, str]:
        models = [copy.deepcopy(first), copy.deepcopy(second)]
        optimizers = [sgd(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.distribute(model, optimizer)
        with session.join():
            for step in range(2 + 2 * session.rank):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(rows(session.rank, step)).square().mean().backward()
                    optimizer.step()
        return session.digest(models[0]), session.digest(models[1])

    assert len(set(run_ranks(2, body))) == 1


def test_who_leaves_without_it_is_named() -> None:
    torch.manual_seed(0)
    base = plain()

    def body(session: Session) -> str:
        model = copy.deepcopy(base)
        session.distribute(model, sgd(model))
        if session.rank:
            return ""
        with pytest.raises(PeerLostError, match="rank 1 ended while rank 0 still waits"), session.join():
            pass
        return ""

    run_ranks(2, body)


def test_alone_and_under_ddp() -> None:
    def body(session: Session) -> None:
        with session.join():
            pass
        session._models.append(_ddp())
        with pytest.raises(UserError, match="comm='ddp': take ps, sfb or hybrid"), session.join():
            pass
        session._models.clear()

    run_ranks(1, body)


def _ddp() -> Any:
    from poseidon.api.ddp import DDP
    from poseidon.api.session import _Distributed

    return _Distributed(plain(), "ddp", 0, object.__new__(DDP))
