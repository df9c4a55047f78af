"""Steps of optimizers that distribute() has not seen, or that wrap others; what is trained beside the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from poseidon.api import Session
from tests.engine.nets import assert_exact
from tests.matrix.harness import COMMS, mean_square
from tests.ranks import run_ranks

SIZES = [5, 3]
STEPS = 5

torch.manual_seed(0)
BASE = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Clipped(torch.optim.SGD):
    """Calls what it is a subclass of: a step within a step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], 0.01)
        return super().step(closure)


class Bare(torch.optim.Optimizer):
    """Another optimizer's groups and state are its own; it was never initialised as an optimizer."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Wrapper(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": sgd,
    "calls super": lambda model: Clipped(model.parameters(), lr=0.05, momentum=0.9),
    "wrapper": lambda model: Wrapper(sgd(model)),
    "wrapper without init": lambda model: Bare(sgd(model)),
}


def share(step: int, rank: int | None) -> torch.Tensor:
    x = torch.randn(sum(SIZES), 6, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[: SIZES[0]] if rank == 0 else x[SIZES[0] :]


def values(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.detach().clone() for p in model.parameters()]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model(x), torch.ones(len(x)))


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "made afterwards"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whoever_steps(name: str, distributed: bool, comm: str) -> None:
    """session.rows() holds for one step only; a rank whose loss misses the model keeps nobody waiting; steps and
    backward passes are one to one."""

    def train(model: nn.Module, optimizer: Any, session: Session | None) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            x = share(step, None if session is None else session.rank)
            if step == 1:  # only the first row counts on rank 0
                first = share(step, None)[[0, 5, 6, 7]]
                x = first if session is None else first[:1] if session.rank == 0 else first[1:]
                if session is not None:
                    session.rows(len(x))
                    x = torch.cat([x, x])
            if step == 3 and session is None:
                x = share(step, 0)
            if not (step == 3 and session is not None and session.rank == 1):
                loss_of(model, x).backward()
            optimizer.step()

    def body(session: Session) -> Any:
        model = copy.deepcopy(BASE)
        optimizer = OPTIMIZERS[name](model)
        session.distribute(model, optimizer if distributed else sgd(model), comm=comm)  # type: ignore[arg-type]
        train(model, optimizer, session)
        (engine,) = session._engines()
        return values(model), session.digest(model), engine.round, engine.stepping.count

    alone = copy.deepcopy(BASE)
    train(alone, OPTIMIZERS[name](alone), None)
    ranks = run_ranks(2, body)
    assert len({digest for _, digest, *_ in ranks}) == 1
    for got, _, rounds, steps in ranks:
        assert_exact(got, values(alone))
        assert rounds == steps == STEPS


@pytest.mark.parametrize("first", [True, False], ids=["its first step", "a later one"])
def test_a_new_optimizer_and_a_loss_that_misses_the_model(first: bool) -> None:
    def body(session: Session) -> str:
        model = copy.deepcopy(BASE)
        session.distribute(model, sgd(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            if session.rank == 0 or step != (0 if first else 1):
                loss_of(model, share(step, session.rank)).backward()
            optimizer.step()
        return session.digest(model)

    assert len(set(run_ranks(2, body))) == 1


def test_no_hook_is_left() -> None:
    before = len(torch_optimizer._global_optimizer_pre_hooks)

    def body(session: Session) -> None:
        model = copy.deepcopy(BASE)
        optimizer = sgd(model)
        session.distribute(model, optimizer)
        assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
        session.synchronize()
        session.undistribute(model)

    run_ranks(2, body)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


# --- what cannot be averaged -----------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if not line.startswith("ranks have different numbers of rows")]


def test_what_is_trained_beside_the_model_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> None:
        model = copy.deepcopy(BASE)
        temperature = nn.Parameter(torch.ones(2, 1))
        frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        optimizer = torch.optim.SGD([*model.parameters(), temperature, frozen], lr=0.1)
        session.distribute(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            (loss_of(model, share(step, session.rank)) * temperature.sum()).backward()
            optimizer.step()

    run_ranks(2, body)
    (line,) = warnings(caplog)
    assert "no distributed model (1, of shape [2, 1])" in line


def test_an_optimizer_of_two_models_is_no_stranger(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> None:
        one, two = copy.deepcopy(BASE), copy.deepcopy(BASE)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
        session.distribute(one, optimizer)
        session.distribute(two, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            x = share(step, session.rank)
            (loss_of(one, x) + loss_of(two, x)).backward()
            optimizer.step()

    run_ranks(2, body)
    assert not warnings(caplog)


@pytest.mark.parametrize("before", [True, False], ids=["before distribute", "afterwards"])
def test_steps_inside_the_backward_pass_are_named_once(before: bool, caplog: pytest.LogCaptureFixture) -> None:
    def install(model: nn.Module) -> None:
        each = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def hook(p: torch.Tensor) -> None:
            each[p].step()  # type: ignore[index]
            each[p].zero_grad()  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

    def body(session: Session) -> None:
        model = copy.deepcopy(BASE)
        if before:
            install(model)
        session.distribute(model, sgd(model))
        if not before:
            install(model)
        for step in range(3):
            loss_of(model, share(step, session.rank)).backward()

    run_ranks(2, body)
    (line,) = warnings(caplog)
    assert line.startswith("SGD.step() runs inside the backward pass")
