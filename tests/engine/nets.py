"""Small networks and seeded batches. Built outside the rank threads: torch's global generator is shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from poseidon.api import Session
from tests.ranks import run_ranks

Batch = tuple[torch.Tensor, torch.Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(inplace=True), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 2),
        nn.Flatten(),
        nn.Linear(64, 400),
        nn.ReLU(),
        nn.Linear(400, 10),
    )


def batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "lenet": lenet, "batchnorm": batchnorm}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]()


def clone(model: nn.Module, rank: int) -> nn.Module:
    """A rank's own copy; wrong on all ranks but 0, which must win at start."""
    mine = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for p in mine.parameters():
                p.add_(rank)
    return mine


def batch(step: int, rows: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, 64, generator=generator)
    return x, torch.randint(0, 10, (rows,), generator=generator)


def share(data: Batch, rank: int, sizes: list[int]) -> Batch:
    start = sum(sizes[:rank])
    return data[0][start : start + sizes[rank]], data[1][start : start + sizes[rank]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_exact(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> None:
    """design.md, *Exact* (a): within 1e-5 x the layer's largest entry + 1e-7 x the model's."""
    model_max = max(float(w.abs().max()) for w in want if w is not None and w.numel())
    assert len(got) == len(want)
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g is None) == (w is None), f"parameter {index}: gradient {g is not None}, expected {w is not None}"
        if g is None or w is None or not w.numel():
            continue
        worst = float((g - w).abs().max())
        assert worst <= 1e-5 * float(w.abs().max()) + 1e-7 * model_max, f"parameter {index}: off by {worst}"


#: What a training step does between zero_grad() and step(): (model, optimizer, this rank's batch, session);
#: the session is None for the one process that has the whole batch.
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch, Session | None], None]


def one_pass(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
    functional.cross_entropy(model(data[0]), data[1]).backward()


def assert_equals_one_process(
    base: nn.Module, sizes: list[int], comm: str, step: Step, *, set_to_none: bool = True
) -> None:
    """Three steps on len(sizes) ranks: gradients as of one process, replicas equal bit for bit."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session | None) -> list[Any]:
        seen = []
        for number in range(3):
            data = batch(number, sum(sizes))
            optimizer.zero_grad(set_to_none=set_to_none)
            step(model, optimizer, data if session is None else share(data, session.rank, sizes), session)
            seen.append(grads(model))
            optimizer.step()
        return seen

    reference = copy.deepcopy(base)
    want = train(reference, sgd(reference), None)

    def body(session: Session) -> tuple[list[Any], str]:
        model = clone(base, session.rank)
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        return train(model, optimizer, session), session.digest(model)

    ranks = run_ranks(len(sizes), body)
    for seen, _ in ranks:
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)
    assert len({digest for _, digest in ranks}) == 1
