"""Training loops of every make: closures, loss scaling, schedules, odd ranks, lazy modules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from poseidon.api import Session
from poseidon.errors import UserError
from tests.engine.nets import assert_exact, grads
from tests.matrix.harness import COMMS, SIZES, mean_square
from tests.ranks import run_ranks

Params = list[torch.Tensor | None]

torch.manual_seed(0)
BASE = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def share(step: int, sizes: list[int], rank: int | None) -> torch.Tensor:
    """A rank's rows of a step; without a rank, all."""
    x = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model(x), torch.ones(len(x)))


def values(model: nn.Module) -> Params:
    return [p.detach().clone() for p in model.parameters()]


# --- closures ----------------------------------------------------------------------------------------------------


def with_closures(model: nn.Module, optimizer: Any, sizes: list[int], rank: int | None) -> list[Params]:
    """Gradients of every evaluation."""
    seen: list[Params] = []
    for step in range(2):
        x = share(step, sizes, rank)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            seen.append(grads(model))
            return loss

        optimizer.step(closure)
    return seen


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    # tolerance_change compares losses, which are each rank's own: 0 leaves the number of evaluations to the gradients.
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_change=0.0),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures_equal_one_process(name: str, sizes: list[int], comm: str) -> None:
    def body(session: Session) -> tuple[list[Params], str]:
        model = copy.deepcopy(BASE)
        optimizer = OPTIMIZERS[name](model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        return with_closures(model, optimizer, sizes, session.rank), session.digest(model)

    alone = copy.deepcopy(BASE)
    want = with_closures(alone, OPTIMIZERS[name](alone), sizes, None)
    ranks = run_ranks(len(sizes), body)
    assert len({digest for _, digest in ranks}) == 1
    for seen, _ in ranks:
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)


# --- loss scaling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1], ids=["first rank", "second rank"])
@pytest.mark.parametrize("comm", COMMS)
def test_an_overflow_on_one_rank_is_skipped_by_all(comm: str, where: int, bad: float) -> None:
    """In the trial round by PS, and in one that follows the plan; the steps after it are those of one process."""
    overflows = {0, 2}

    def body(session: Session) -> tuple[list[float], list[Params]]:
        model = copy.deepcopy(BASE)
        optimizer = OPTIMIZERS["sgd"](model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales, seen = [], []
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, share(step, [5, 3], session.rank))
            if step in overflows and session.rank == where:
                loss = loss * bad
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            seen.append(values(model))
        return scales, seen

    alone = copy.deepcopy(BASE)
    optimizer = OPTIMIZERS["sgd"](alone)
    want = []
    for step in range(5):
        if step not in overflows:
            optimizer.zero_grad()
            loss_of(alone, share(step, [5, 3], None)).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            optimizer.step()
        want.append(values(alone))
    for scales, seen in run_ranks(2, body):
        assert scales == [512.0, 512.0, 256.0, 256.0, 512.0]
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)


# --- schedules ---------------------------------------------------------------------------------------------------

SCHEDULES = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=6),
    "cosine, restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "warm-up": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.7)], [2]
    ),
}


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_step_once_per_step(name: str, when: str) -> None:
    """Whether made before or after distribute()."""

    def train(model: nn.Module, optimizer: Any, schedule: Any, rank: int | None) -> list[float]:
        rates = []
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, share(step, [4, 4], rank)).backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
        return rates

    def body(session: Session) -> tuple[list[float], Params]:
        model = copy.deepcopy(BASE)
        optimizer = OPTIMIZERS["sgd"](model)
        schedule = SCHEDULES[name](optimizer) if when == "before" else None
        session.distribute(model, optimizer, comm="hybrid")
        return train(model, optimizer, schedule or SCHEDULES[name](optimizer), session.rank), values(model)

    alone = copy.deepcopy(BASE)
    optimizer = OPTIMIZERS["sgd"](alone)
    want = train(alone, optimizer, SCHEDULES[name](optimizer), None)
    for rates, params in run_ranks(2, body):
        assert rates == want
        assert_exact(params, values(alone))


# --- ranks that differ -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["no loss", "constant loss", "forward only", "rows(0)", "empty batch"])
@pytest.mark.parametrize("comm", COMMS)
def test_a_rank_whose_loss_misses_the_model_contributes_nothing(comm: str, way: str) -> None:
    """The gradient is that of the other ranks' rows; which rank it is changes."""

    def miss(session: Session, model: nn.Module, x: torch.Tensor) -> None:
        if way == "constant loss":
            torch.ones(3, requires_grad=True).sum().backward()
        elif way == "forward only":
            model(x)
        elif way == "rows(0)":
            session.rows(0)
        elif way == "empty batch":
            model(x[:0]).sum().backward()

    def body(session: Session) -> list[Params]:
        model = copy.deepcopy(BASE)
        optimizer = OPTIMIZERS["sgd"](model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            x = share(step, [4, 4], session.rank)
            if step % 2 == session.rank:
                miss(session, model, x)
            else:
                loss_of(model, x).backward()
            optimizer.step()
            seen.append(values(model))
        return seen

    alone = copy.deepcopy(BASE)
    optimizer = OPTIMIZERS["sgd"](alone)
    want = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(alone, share(step, [4, 4], 1 - step % 2)).backward()
        optimizer.step()
        want.append(values(alone))
    for seen in run_ranks(2, body):
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)


# --- lazy modules ------------------------------------------------------------------------------------------------


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))


@pytest.mark.parametrize("comm", COMMS)
def test_lazy_modules_that_have_seen_a_batch(comm: str) -> None:
    base = lazy()
    base(torch.zeros(1, 6))

    def body(session: Session) -> Params:
        model = copy.deepcopy(base)
        optimizer = OPTIMIZERS["sgd"](model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, share(step, [5, 3], session.rank)).backward()
            optimizer.step()
        return values(model)

    alone = copy.deepcopy(base)
    optimizer = OPTIMIZERS["sgd"](alone)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(alone, share(step, [5, 3], None)).backward()
        optimizer.step()
    for got in run_ranks(2, body):
        assert_exact(got, values(alone))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lazy, "parameter 0.weight"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.LazyBatchNorm1d()), "parameter 1.weight"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.LazyBatchNorm1d(affine=False)), "buffer 1.running_mean"),
    ],
)
def test_lazy_modules_that_have_not_are_named(make: Any, name: str) -> None:
    def body(session: Session) -> str:
        model = make()
        with pytest.raises(UserError, match="has no shape yet") as caught:
            session.distribute(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
        return str(caught.value)

    messages = set(run_ranks(2, body))
    assert len(messages) == 1
    assert messages.pop().startswith(name)


def test_torchs_synchronised_batch_norm_on_the_cpu_is_named_with_the_remedy() -> None:
    def body(session: Session) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
        with pytest.raises(UserError) as caught:
            session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return str(caught.value)

    want = "layer 1 is a torch.nn.SyncBatchNorm, which needs CUDA: call poseidon.sync_batchnorm(model) first"
    assert set(run_ranks(2, body)) == {want}
