"""Copies of a distributed model are plain: they neither take part in the job nor disturb it."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from poseidon.api import Session
from tests.engine.nets import assert_exact
from tests.matrix.harness import COMMS, mean_square
from tests.ranks import run_ranks

SIZES = [5, 3]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x) * self.scale)
        return out


torch.manual_seed(0)
_BASE = Net()


def net() -> nn.Module:
    """Not seeded here: the generator is one for all ranks' threads."""
    return copy.deepcopy(_BASE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int | None) -> None:
    """A step on this rank's rows, or, without a rank, on all."""
    x = torch.randn(sum(SIZES), 6, generator=torch.Generator().manual_seed(number))
    if rank is not None:
        x = x[sum(SIZES[:rank]) : sum(SIZES[: rank + 1])]
    optimizer.zero_grad()
    mean_square(model(x), torch.ones(len(x))).backward()
    optimizer.step()


def one_process(steps: int) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    for number in range(steps):
        step(model, optimizer, number, None)
    return model


def pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_plain_and_trains_alone(way: str, comm: str) -> None:
    """Rank 1 trains a copy of its own between two steps: if that took part in the job, it would hang."""

    def body(session: Session) -> tuple[list[torch.Tensor], nn.Module]:
        model = net()
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        step(model, optimizer, 0, session.rank)
        step(model, optimizer, 1, session.rank)
        other = WAYS[way](model)
        if session.rank:
            own = sgd(other)
            for number in range(3):
                step(other, own, number, session.rank)
        step(model, optimizer, 2, session.rank)
        return [p.detach() for p in model.parameters()], other

    want = [p.detach() for p in one_process(3).parameters()]
    for got, other in run_ranks(2, body):
        assert_exact(list(got), list(want))
        assert type(other) is Net
        assert {type(module) for module in other.modules()} == {Net, nn.Sequential, nn.Tanh, nn.Linear}
        assert str(other) == str(net())
        assert not [p for p in other.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]


@pytest.mark.parametrize("comm", COMMS)
def test_a_copy_is_distributed_beside_its_original(comm: str) -> None:
    def body(session: Session) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = net()
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        step(model, optimizer, 0, session.rank)
        other = copy.deepcopy(model)
        others = sgd(other)
        others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        session.distribute(other, others, comm=comm)  # type: ignore[arg-type]
        for number in range(1, 4):
            step(model, optimizer, number, session.rank)
            step(other, others, number, session.rank)
        return [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()]

    want = [p.detach() for p in one_process(4).parameters()]
    for got, other in run_ranks(2, body):
        assert_exact(list(got), list(want))
        assert_exact(list(other), list(want))


@pytest.mark.parametrize("comm", COMMS)
def test_state_dicts_fit_the_plain_model_and_come_back(comm: str) -> None:
    """A run is stopped after two steps and goes on from its state dicts."""

    def part(session: Session, first: int, last: int, states: Any) -> Any:
        model = net()
        optimizer = sgd(model)
        if states is not None and session.rank == 0:  # the others take rank 0's
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        for number in range(first, last):
            step(model, optimizer, number, session.rank)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def body(session: Session) -> Any:
        states = part(session, 0, 2, None)
        plain = net()
        plain.load_state_dict(states[0])
        assert list(states[0]) == list(net().state_dict())
        return part(session, 2, 4, states)

    want = [p.detach() for p in one_process(4).parameters()]
    for state, _ in run_ranks(2, body):
        model = net()
        model.load_state_dict(state)
        assert_exact([p.detach() for p in model.parameters()], list(want))


@pytest.mark.parametrize("comm", COMMS)
def test_weights_loaded_into_a_distributed_model(comm: str) -> None:
    """In place, as best weights are restored; the optimizer's state too."""

    def body(session: Session) -> list[torch.Tensor]:
        model = net()
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        for number in range(2):
            step(model, optimizer, number, session.rank)
        best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for number in range(5, 8):
            step(model, optimizer, number, session.rank)
        model.load_state_dict(best[0])
        optimizer.load_state_dict(best[1])
        for number in range(2, 4):
            step(model, optimizer, number, session.rank)
        return [p.detach() for p in model.parameters()]

    want = [p.detach() for p in one_process(4).parameters()]
    for got in run_ranks(2, body):
        assert_exact(list(got), list(want))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("comm", COMMS)
def test_moving_averages(comm: str, before: bool) -> None:
    def train(model: nn.Module, averaged: AveragedModel, optimizer: Any, rank: int | None) -> list[torch.Tensor | None]:
        for number in range(4):
            step(model, optimizer, number, rank)
            averaged.update_parameters(model)
        return [p.detach() for p in averaged.parameters()]

    def average(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def body(session: Session) -> tuple[list[torch.Tensor | None], str]:
        model = net()
        averaged = average(model) if before else None
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        averaged = averaged or average(model)
        return train(model, averaged, optimizer, session.rank), session.digest(averaged)

    reference = net()
    want = train(reference, average(reference), sgd(reference), None)
    ranks = run_ranks(2, body)
    assert len({digest for _, digest in ranks}) == 1
    for got, _ in ranks:
        assert_exact(got, want)


def test_optimizers_are_copied_and_pickled() -> None:
    def body(session: Session) -> None:
        model = net()
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm="hybrid")
        step(model, optimizer, 0, session.rank)
        both = copy.deepcopy((model, optimizer))
        assert both[1].param_groups[0]["params"][0] is next(both[0].parameters())
        if session.rank:  # alone: if they took part, it would wait for the others
            step(*both, 1, session.rank)
        step(model, optimizer, 1, session.rank)
        assert session.report(model)["iterations"] == 1
        assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == optimizer.state_dict().keys()

    run_ranks(2, body)


def test_a_rank_that_reads_its_state_when_rank_0_has_gone() -> None:
    base, gone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), threading.Event()

    def body(session: Session) -> torch.Tensor:
        model = copy.deepcopy(base)
        optimizer = sgd(model)
        session.distribute(model, optimizer)
        step(model, optimizer, 0, session.rank)
        if session.rank:
            assert gone.wait(20)
            return model.state_dict()["1.running_mean"]
        session.undistribute(model)
        session.close()
        gone.set()
        return model.state_dict()["1.running_mean"]

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)
