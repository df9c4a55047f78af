"""Every optimizer of torch.optim: what it makes of the averaged gradients is what it makes of them without an engine.

design.md, *Exact* (c): fed the same recorded gradients, the same bits. (Adam and its like amplify rounding where a
true gradient is zero: comparing with one process on the whole batch would be no test of them.)
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from poseidon.api import Session
from poseidon.errors import UserError
from tests.engine.nets import batch, grads, share
from tests.ranks import run_ranks

STEPS = 4
SIZES = [7, 5]
Grads = list[torch.Tensor | None]


class Net(nn.Module):
    """Gradients that are dense, of channels_last, made of factors, sparse, sometimes missing, and always missing."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(20, 64, sparse=True)
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.hidden, self.last = nn.Linear(144, 60), nn.Linear(60, 10)
        self.sometimes, self.never = nn.Linear(10, 10), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, codes: torch.Tensor, step: int) -> torch.Tensor:
        x = (x + self.codes(codes)).view(-1, 1, 8, 8).contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = self.last(self.hidden(self.conv(x).relu().flatten(1)).relu())
        return self.sometimes(out) if step % 2 else out


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = share(batch(step, sum(SIZES)), rank, SIZES)
    return F.cross_entropy(model(x, 2 * y + step % 2, step), y)


Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """Makes the optimizers of a net; the codes, whose gradients are sparse, have one of their own."""

    make: Callable[[Net], Optimizers]
    schedule: Callable[[Any], Any] | None = None
    closure: bool = False  # the optimizer evaluates the loss itself


def dense(net: Net) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if not name.startswith("codes")]


def sparse(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.codes.parameters(), lr=0.1)


def plain(kind: Any, options: Callable[[], dict[str, Any]]) -> Case:
    return Case(lambda net: [kind(dense(net), **options()), sparse(net)])


def in_groups(kind: Any) -> Case:
    """Biases with a rate of their own, and without decay."""

    def make(net: Net) -> Optimizers:
        weights = [p for p in dense(net) if p.ndim > 1]
        biases = [p for p in dense(net) if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}]
        return [kind(groups, lr=0.01), sparse(net)]

    return Case(make)


#: What each class is tried with, where it takes all of these arguments. Tensors are made anew for each rank.
VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "foreach": lambda: {"foreach": True},
    "fused": lambda: {"fused": True},
    "maximize": lambda: {"maximize": True, "foreach": False},
    "tensor rate": lambda: {"lr": torch.tensor(0.01), "foreach": False},
    "momentum": lambda: {"momentum": 0.9, "weight_decay": 0.01},
    "nesterov": lambda: {"momentum": 0.9, "nesterov": True, "dampening": 0},
    "centered": lambda: {"centered": True, "momentum": 0.5},
    "amsgrad": lambda: {"amsgrad": True, "weight_decay": 0.1},
    "decoupled decay": lambda: {"decoupled_weight_decay": True, "weight_decay": 0.1},
}
#: They do not take all parameters of a net: see `others` below.
SPECIAL = {"Optimizer", "LBFGS", "Muon", "SparseAdam"}


def classes() -> Iterator[tuple[str, Any]]:
    """Also those of another torch than this was written with."""
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in SPECIAL:
            yield name, kind


def cases() -> dict[str, Case]:
    found = {}
    for name, kind in classes():
        takes = inspect.signature(kind).parameters
        for variant, options in VARIANTS.items():
            if set(options()) <= set(takes):
                found[f"{name}, {variant}"] = plain(kind, options)
        if "weight_decay" in takes:
            found[f"{name}, groups"] = in_groups(kind)
    return found | others()


def others() -> dict[str, Case]:
    def muon(net: Net) -> Optimizers:
        inner = [p for p in dense(net) if p.ndim == 2]
        rest = [p for p in dense(net) if p.ndim != 2]
        return [torch.optim.Muon(inner), torch.optim.AdamW(rest, fused=True), sparse(net)]

    def sparse_adam(net: Net) -> Optimizers:
        return [torch.optim.SparseAdam(net.codes.parameters(), lr=0.05), torch.optim.SGD(dense(net), lr=0.1)]

    def by_name(net: Net) -> Optimizers:
        named = [(name, p) for name, p in net.named_parameters() if not name.startswith("codes")]
        return [torch.optim.AdamW(named), sparse(net)]

    def lbfgs(net: Net) -> Optimizers:
        for p in net.codes.parameters():
            p.requires_grad_(False)
        return [torch.optim.LBFGS(dense(net), lr=0.1, max_iter=4, tolerance_change=0.0)]

    def searching(net: Net) -> Optimizers:
        for p in net.codes.parameters():
            p.requires_grad_(False)
        return [torch.optim.LBFGS(dense(net), max_iter=3, line_search_fn="strong_wolfe")]

    def sgd(net: Net) -> Optimizers:
        return [torch.optim.SGD(dense(net), lr=0.1, momentum=0.9), sparse(net)]

    return {
        "Muon, and AdamW for the rest": Case(muon),
        "SparseAdam, and SGD for the rest": Case(sparse_adam),
        "AdamW, of named parameters": Case(by_name),
        "SGD, momentum scheduled": Case(sgd, lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=STEPS)),
        "SGD, rate by the loss": Case(sgd, lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=1.0)),
        "LBFGS": Case(lbfgs, closure=True),
        "LBFGS, line search": Case(searching, closure=True),
    }


CASES = cases()


def train(case: Case, net: Net, optimizers: Optimizers, evaluate: Callable[[int], torch.Tensor]) -> list[Any]:
    """`evaluate` leaves a step's gradients in the net. Returns the parameters after each step."""
    schedule = case.schedule(optimizers[0]) if case.schedule is not None else None
    after = []
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            return evaluate(step)

        if not case.closure:
            loss = closure()
        for optimizer in optimizers:
            optimizer.step(*[closure] if case.closure else [])  # type: ignore[arg-type]
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(float(loss))
        elif schedule is not None:
            schedule.step()
        after.append([p.detach().clone() for p in net.parameters()])
    return after


class Mean:
    """Over all rows of all ranks, as session.gather() would give it to decide by."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(len(SIZES))
        self._losses = torch.zeros(len(SIZES))

    def __call__(self, loss: torch.Tensor, rank: int) -> torch.Tensor:
        self._losses[rank] = loss.detach()
        self._barrier.wait(30)
        mean = self._losses @ torch.tensor(SIZES, dtype=torch.float32) / sum(SIZES)
        self._barrier.wait(30)
        return mean


def on_ranks(case: Case, base: Net) -> list[tuple[list[Any], list[tuple[torch.Tensor, Grads]]]]:
    """Of each rank: parameters after each step, and what every evaluation of the loss gave."""
    mean = Mean()

    def body(session: Session) -> Any:
        net = copy.deepcopy(base)
        optimizers = case.make(net)
        session.distribute(net, optimizers, comm="hybrid")
        recorded = []

        def evaluate(step: int) -> torch.Tensor:
            loss = loss_of(net, step, session.rank)
            loss.backward()
            recorded.append((mean(loss, session.rank), grads(net)))
            return recorded[-1][0]

        after = train(case, net, optimizers, evaluate)
        assert session.report(net)["schemes"]["hidden"] == "sfb"
        return after, recorded

    return run_ranks(len(SIZES), body)


def replay(case: Case, net: Net, recorded: list[tuple[torch.Tensor, Grads]]) -> list[Any]:
    """A plain process that is given the gradients."""
    evaluations = iter(recorded)

    def evaluate(step: int) -> torch.Tensor:
        loss, found = next(evaluations)
        for p, grad in zip(net.parameters(), found, strict=True):
            p.grad = None if grad is None else grad.clone()
        return loss

    after = train(case, net, case.make(net), evaluate)
    assert next(evaluations, None) is None
    return after


def same_bits(one: list[Any], other: list[Any]) -> bool:
    """After each step."""
    return all(all(map(torch.equal, a, b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_fed_the_recorded_gradients_it_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    base = Net()
    ranks = on_ranks(CASES[name], base)
    assert same_bits(ranks[0][0], ranks[1][0])
    for after, recorded in ranks:
        assert any(grad is None for grad in recorded[0][1])
        assert same_bits(after, replay(CASES[name], copy.deepcopy(base), recorded))


def test_every_class_is_tried() -> None:
    tried = {name.split(",")[0] for name in CASES}
    assert {name for name, _ in classes()} <= tried
    assert tried >= {"SGD", "Adam", "AdamW", "Adafactor", "Rprop", "LBFGS"}
    assert {"SGD, fused", "Adam, fused", "Adagrad, fused", "ASGD, foreach"} <= set(CASES)


def test_a_group_that_is_added_on_the_way_is_trained() -> None:
    """Its parameters were the model's all along, frozen until then."""
    torch.manual_seed(0)
    base = Net()

    def make(net: Net) -> Optimizers:
        net.last.requires_grad_(False)
        return [torch.optim.AdamW([p for p in dense(net) if p.requires_grad]), sparse(net)]

    def body(session: Session) -> Any:
        net = copy.deepcopy(base)
        optimizers = make(net)
        session.distribute(net, optimizers)

        def evaluate(step: int) -> torch.Tensor:
            if step == 2:
                thaw(net, optimizers)
            loss = loss_of(net, step, session.rank)
            loss.backward()
            return loss

        return train(Case(make), net, optimizers, evaluate)

    def thaw(net: Net, optimizers: Optimizers) -> None:
        net.last.requires_grad_(True)
        optimizers[0].add_param_group({"params": net.last.parameters(), "lr": 0.1})

    index = [name for name, _ in base.named_parameters()].index("last.weight")
    one, other = run_ranks(len(SIZES), body)
    assert same_bits(one, other)
    assert torch.equal(one[1][index], base.last.weight)
    assert not torch.equal(one[2][index], base.last.weight)


def test_rates_that_are_tensors_are_compared_too() -> None:
    def body(session: Session) -> str:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5 if session.rank else 0.25), foreach=False)
        with pytest.raises(UserError) as error:
            session.distribute(net, optimizer)
        return str(error.value)

    for said in run_ranks(2, body):
        assert "lr=0.25" in said
        assert "lr=0.5" in said
