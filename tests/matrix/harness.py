"""One comparison for every kind of model: P ranks with rows of different number against one process with all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from poseidon.api import Session
from tests.engine.nets import assert_exact, grads
from tests.ranks import run_ranks

COMMS = ["ps", "sfb", "hybrid"]
SIZES = [[5, 3], [2, 4, 3]]
Inputs = tuple[torch.Tensor, ...]
Servers = int | list[int] | None


def vectors(width: int) -> Callable[[torch.Generator, int], Inputs]:
    """Inputs of (rows, width)."""
    return lambda generator, rows: (torch.randn(rows, width, generator=generator),)


def images(*shape: int) -> Callable[[torch.Generator, int], Inputs]:
    return lambda generator, rows: (torch.randn(rows, *shape, generator=generator),)


def tokens(vocabulary: int, positions: int) -> Callable[[torch.Generator, int], Inputs]:
    return lambda generator, rows: (torch.randint(0, vocabulary, (rows, positions), generator=generator),)


def mean_square(output: Any, number: torch.Tensor) -> torch.Tensor:
    """A mean over rows of any tensor, weighted by each row's number so that rows differ."""
    return (output.flatten(1).square().mean(1) * number).mean()


@dataclass
class Case:
    """A kind of model or technique.

    Attributes:
        model: makes the model; the torch seed is fixed.
        inputs: (generator, rows) -> tensors whose first dimension is the row.
        loss: (output, number of (rows,)) -> mean over the rows.
        step: replaces forward, loss and backward: step(model, optimizer, inputs, number, session or None).
        optimizer: of the model's parameters.
        after: called with the model once it is distributed (and on the one process's model); what it returns is
            trained in its place.
        options: for session.distribute.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Inputs]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = mean_square
    step: Callable[..., None] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(
        default=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    )
    after: Callable[[nn.Module], Any] = lambda model: model
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3

    def take(self, model: nn.Module, optimizer: Any, inputs: Inputs, number: torch.Tensor, session: Any) -> None:
        if self.step is not None:
            self.step(model, optimizer, inputs, number, session)
        else:
            self.loss(model(*inputs), number).backward()

    def data(self, step: int, rows: int) -> tuple[Inputs, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        return self.inputs(generator, rows), torch.rand(rows, generator=generator) + 0.5


def assert_equals_one_process(
    case: Case, comm: str, sizes: list[int], devices: Sequence[int] = (), servers: Servers = None, **options: Any
) -> list[dict[str, Any]]:
    """Gradients of every step, replicas bit for bit. Returns each rank's report. `options`: of run_ranks."""
    base = build(case)
    reference = copy.deepcopy(base)
    trained, optimizer = case.after(reference), case.optimizer(reference)
    want = [gradients(case, trained, optimizer, *case.data(number, sum(sizes)), None) for number in range(case.steps)]
    ranks = on_ranks(case, base, comm, sizes, devices, servers, **options)
    for seen, _ in ranks:
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)
    return [report for _, report in ranks]


def assert_equals_ddp(case: Case, comm: str, sizes: list[int]) -> list[dict[str, Any]]:
    """The same against the mean of the ranks' local gradients, every rank with the same weight: PyTorch's DDP."""
    base = build(case)
    reference = copy.deepcopy(base)
    trained, optimizer = case.after(reference), case.optimizer(reference)
    ranks = on_ranks(replace(case, options={"rows": "equal", **case.options}), base, comm, sizes)
    for number in range(case.steps):
        local = []
        for rank in range(len(sizes)):
            optimizer.zero_grad()
            inputs, factor = share(case.data(number, sum(sizes)), rank, sizes)
            case.take(trained, optimizer, inputs, factor, None)
            local.append(grads(reference))
        want = [mean(of_ranks) for of_ranks in zip(*local, strict=True)]
        for seen, _ in ranks:
            assert_exact(seen[number], want)
        for p, grad in zip(reference.parameters(), want, strict=True):
            p.grad = grad
        optimizer.step()
    return [report for _, report in ranks]


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def on_ranks(
    case: Case,
    base: nn.Module,
    comm: str,
    sizes: list[int],
    devices: Sequence[int] = (),
    servers: Servers = None,
    **options: Any,
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Of each rank: gradients of every step, and its report. Replicas are equal bit for bit.

    Args:
        devices: ranks per node.
        servers: as in Topology.of.
        options: of run_ranks.
    """

    def body(session: Session) -> tuple[list[Any], str, dict[str, Any]]:
        model = copy.deepcopy(base)
        optimizer = case.optimizer(model)
        session.distribute(model, optimizer, comm=comm, **case.options)  # type: ignore[arg-type]
        trained = case.after(model)
        seen = []
        for number in range(case.steps):
            data = share(case.data(number, sum(sizes)), session.rank, sizes)
            seen.append(gradients(case, trained, optimizer, *data, session))
        session.synchronize()
        return seen, session.digest(model), session.report(model)

    ranks = run_ranks(len(sizes), body, devices=devices, servers=servers, **options)
    assert len({digest for _, digest, _ in ranks}) == 1
    return [(seen, report) for seen, _, report in ranks]


def gradients(
    case: Case, model: nn.Module, optimizer: Any, inputs: Inputs, number: torch.Tensor, session: Any
) -> list[torch.Tensor | None]:
    """One step; the gradient that the optimizer saw."""
    optimizer.zero_grad()
    case.take(model, optimizer, inputs, number, session)
    seen = [dense(grad) for grad in grads(model)]
    optimizer.step()
    return seen


def share(data: tuple[Inputs, torch.Tensor], rank: int, sizes: list[int]) -> tuple[Inputs, torch.Tensor]:
    """A rank's rows."""
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return tuple(t[mine] for t in data[0]), data[1][mine]


def mean(of_ranks: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Over all ranks; one that has no gradient counts as zero, unless none has."""
    there = [grad for grad in of_ranks if grad is not None]
    return torch.stack(there).sum(0) / len(of_ranks) if there else None


def dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad if grad is None or grad.layout == torch.strided else grad.to_dense()


__all__ = [
    "COMMS",
    "SIZES",
    "Case",
    "F",
    "assert_equals_ddp",
    "assert_equals_one_process",
    "images",
    "mean_square",
    "tokens",
    "vectors",
]
