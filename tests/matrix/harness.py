"""One comparison for every kind of model: P ranks with rows of different number against one process with all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
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
        options: for session.distribute.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Inputs]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = mean_square
    step: Callable[..., None] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(
        default=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    )
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


def assert_equals_one_process(case: Case, comm: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Gradients of every step, replicas bit for bit. Returns each rank's report."""
    torch.manual_seed(0)
    base = case.model()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session | None) -> list[Any]:
        seen = []
        for number in range(case.steps):
            inputs, factor = case.data(number, sum(sizes))
            if session is not None:
                first = sum(sizes[: session.rank])
                mine = slice(first, first + sizes[session.rank])
                inputs, factor = tuple(t[mine] for t in inputs), factor[mine]
            optimizer.zero_grad()
            case.take(model, optimizer, inputs, factor, session)
            seen.append(grads(model))
            optimizer.step()
        return seen

    reference = copy.deepcopy(base)
    want = train(reference, case.optimizer(reference), None)

    def body(session: Session) -> tuple[list[Any], str, dict[str, Any]]:
        model = copy.deepcopy(base)
        optimizer = case.optimizer(model)
        session.distribute(model, optimizer, comm=comm, **case.options)  # type: ignore[arg-type]
        seen = train(model, optimizer, session)
        return seen, session.digest(model), session.report(model)

    ranks = run_ranks(len(sizes), body)
    for seen, _, _ in ranks:
        for got, expected in zip(seen, want, strict=True):
            assert_exact([dense(g) for g in got], [dense(g) for g in expected])
    assert len({digest for _, digest, _ in ranks}) == 1
    return [report for _, _, report in ranks]


def dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad if grad is None or grad.layout == torch.strided else grad.to_dense()


__all__ = ["COMMS", "SIZES", "Case", "F", "assert_equals_one_process", "images", "mean_square", "tokens", "vectors"]
