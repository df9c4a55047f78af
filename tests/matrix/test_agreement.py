"""Ranks agree at the start, and notice when they no longer do on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from poseidon.api import Session
from poseidon.errors import OutOfStepError, PoseidonError, UserError
from tests.matrix.harness import COMMS, SIZES, mean_square, vectors
from tests.ranks import run_ranks


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def rows(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 6, generator=generator), torch.ones(4)


def pass_(model: nn.Module, rank: int) -> None:
    x, number = rows(rank)
    mean_square(model(x), number).backward()


def errors_of(
    world_size: int, body: Callable[[Session, nn.Module, torch.optim.Optimizer], Any], comm: str
) -> list[Any]:
    """Each rank's exception, or None."""

    def one(session: Session) -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        try:
            body(session, model, optimizer)
        except PoseidonError as error:
            return error
        return None

    return run_ranks(world_size, one)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_different_numbers_of_backward_passes_per_step_are_named_on_every_rank(comm: str, world_size: int) -> None:
    def body(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            pass_(model, session.rank)
            if session.rank == 1:
                pass_(model, session.rank)
            optimizer.step()

    said = errors_of(world_size, body, comm)
    assert all(isinstance(error, UserError) for error in said)
    assert any(isinstance(error, OutOfStepError) for error in said)
    for error in said:
        assert "ranks are out of step" in str(error)
        assert "rank 1" in str(error)
        assert "before backward pass 1" in str(error)


@pytest.mark.parametrize("comm", COMMS)
def test_a_step_less_on_one_rank(comm: str) -> None:
    def body(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(4):
            pass_(model, session.rank)
            if (session.rank, number) != (0, 1):
                optimizer.step()

    for error in errors_of(2, body, comm):
        assert "out of step" in str(error)
        assert "before backward pass 2" in str(error)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_every_rank_starts_with_the_optimizer_state_of_rank_0(make: Any) -> None:
    def body(session: Session) -> Any:
        torch.manual_seed(session.rank)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=make is torch.optim.SparseAdam))
        optimizer = make(model.parameters(), lr=0.1)
        for _ in range(session.rank + 2):  # before it is distributed

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.tensor([0, 1])).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        session.distribute(model, optimizer)
        return optimizer.state_dict()["state"], model.state_dict()

    (first, weights), *others = run_ranks(3, body)
    assert first
    for state, its_weights in others:
        assert same(state, first)
        assert same(its_weights, weights)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model, rank: torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1)),
            r"ranks differ: optimizer 0, group 0 .*lr=0.1.* on rank 0, but .*lr=0.2.* on rank 1",
        ),
        (
            lambda model, rank: (torch.optim.SGD if rank else torch.optim.Adam)(model.parameters(), lr=0.1),
            "ranks differ: optimizer 0 Adam on rank 0, but optimizer 0 SGD on rank 1",
        ),
        (
            lambda model, rank: torch.optim.SGD(list(model.parameters())[rank:], lr=0.1),
            r"ranks differ: optimizer 0, group 0, parameters 0.weight .*, but .* 0.bias",
        ),
    ],
)
def test_different_optimizers_give_the_same_error_everywhere(make: Any, message: str) -> None:
    def body(session: Session) -> str:
        model = mlp()
        with pytest.raises(UserError, match=message) as raised:
            session.distribute(model, make(model, session.rank))
        return str(raised.value)

    assert len(set(run_ranks(2, body))) == 1


def test_what_is_no_optimizer_is_refused() -> None:
    def body(session: Session) -> None:
        with pytest.raises(UserError, match=r"optimizer is a str, must be a torch\.optim\.Optimizer or a list"):
            session.distribute(mlp(), "sgd")  # type: ignore[arg-type]

    run_ranks(2, body)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
def test_two_optimizers_on_one_model(comm: str, sizes: list[int]) -> None:
    """Also when the loss of rank 0 misses the model in every other step."""
    data = vectors(6)(torch.Generator().manual_seed(1), sum(sizes))[0]

    def train(model: nn.Module, x: torch.Tensor, session: Session | None) -> dict[str, torch.Tensor]:
        bottom = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)  # type: ignore[index]
        top = torch.optim.Adam(model[2].parameters(), lr=0.01)  # type: ignore[index]
        if session is not None:
            session.distribute(model, [bottom, top], comm=comm)  # type: ignore[arg-type]
        for number in range(4):
            bottom.zero_grad()
            top.zero_grad()
            weights = torch.ones(len(x))
            if session is None and number % 2:
                weights[: sizes[0]] = 0
            if session is not None:
                session.rows(len(x))
            if session is None or session.rank or not number % 2:
                mean_square(model(x), weights).backward()
            bottom.step()
            top.step()
        return model.state_dict()

    base = mlp()  # not in the ranks' threads, which share PyTorch's generator
    want = train(copy.deepcopy(base), data, None)

    def body(session: Session) -> dict[str, torch.Tensor]:
        first = sum(sizes[: session.rank])
        return train(copy.deepcopy(base), data[first : first + sizes[session.rank]], session)

    first, *others = run_ranks(len(sizes), body)
    torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-6)
    assert all(same(other, first) for other in others)


def test_a_copy_made_before_is_no_part_of_it() -> None:
    def body(session: Session) -> bool:
        model = mlp()
        other = copy.deepcopy(model)
        session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        pass_(other, session.rank)
        return all(p.grad is not None for p in other.parameters())

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("comm", COMMS)
def test_a_rank_that_waits_in_a_gather_while_another_waits_for_its_gradients(comm: str) -> None:
    """A step less on one rank, and then an evaluation: neither would ever go on."""
    store = dist.HashStore()

    def body(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        session._store = store
        session._exchange.elsewhere = session._elsewhere  # type: ignore[union-attr]
        for _ in range(3 - session.rank):
            pass_(model, session.rank)
            optimizer.step()
        session.gather(None)

    for error in errors_of(2, body, comm):
        assert isinstance(error, UserError)
        assert "ranks are out of step: rank 0 waits for rank 1" in str(error)
        assert "rank 1 is in session.gather() (a barrier, an evaluation ...) after 2 optimizer steps" in str(error)


def test_replicas_that_differ_are_named_on_every_rank() -> None:
    store = dist.HashStore()

    def body(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        session._store = store
        pass_(model, session.rank)
        optimizer.step()
        session.check(model)
        if session.rank:
            with torch.no_grad():
                model[2].weight[0, 0] += 1  # type: ignore[index, union-attr]
        session.check(model)

    for error in errors_of(2, body, "hybrid"):
        assert "replicas differ: 2.weight of rank 1 is not that of rank 0" in str(error)


class Lookahead(torch.optim.SGD):
    """Says of its state what it likes."""

    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, Lookahead])
def test_state_arrives_whatever_state_dict_says_and_held_groups_stay(kind: type[torch.optim.SGD]) -> None:
    def body(session: Session) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        held = optimizer.param_groups[0]
        model(torch.full((2, 3), session.rank + 1.0)).sum().backward()
        optimizer.step()  # momentum of one's own
        session.distribute(model, optimizer, comm="ps")
        held["lr"] = 0.01
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return session.digest(model), optimizer.state[model.weight]["momentum_buffer"].flatten().tolist()

    first, second = run_ranks(2, body)
    assert first == second
