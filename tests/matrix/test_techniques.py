"""Every technique of training, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.matrix.harness import COMMS, SIZES, Case, assert_equals_one_process, mean_square, vectors


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), mlp_of(8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


def mlp_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def clip_norm(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    mean_square(model(*inputs), number).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_value(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    mean_square(model(*inputs), number).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def input_penalty(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Gradient penalty: a loss of the gradient with respect to the input (double backward)."""
    x = inputs[0].requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (mean_square(out, number) + mean_square(grad, number)).backward()


def create_graph(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    mean_square(model(*inputs), number).backward(create_graph=True)
    for p in model.parameters():
        p.grad = p.grad.detach()


def halves(no_sync: bool, forward_outside: bool) -> Any:
    """Two micro-batches, every rank's share the same in both."""

    def step(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
        (x,) = inputs
        if session is not None:
            session.rows(len(x))
        first = mean_square(model(x), number) / 2 if forward_outside else None
        if session is not None and no_sync:
            with session.no_sync():
                (mean_square(model(x), number) / 2 if first is None else first).backward()
        else:
            (mean_square(model(x), number) / 2 if first is None else first).backward()
        (mean_square(model(2 * x), number) / 2).backward()

    return step


def only_some(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """backward(inputs=...)"""
    mean_square(model(*inputs), number).backward(inputs=[model[0].weight, model[4].bias])


def retained(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    loss = mean_square(model(*inputs), number)
    loss.backward(retain_graph=True)
    loss.backward()


def looks_first(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """autograd.grad of the weights on the way: no part of the step."""
    loss = mean_square(model(*inputs), number)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def evaluates(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(11, 6))
    with torch.inference_mode():
        model(torch.zeros(7, 6))
    model.train()
    mean_square(model(*inputs), number).backward()


def adds_hooks(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Linear user hooks on parameters, and hooks on modules."""
    handles = [
        model[0].weight.register_hook(lambda grad: grad * 2),
        model[2].weight.register_post_accumulate_grad_hook(lambda p: None),
        model[2].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,)),
        model[4].register_forward_hook(lambda module, args, out: out * 3),
    ]
    mean_square(model(*inputs), number).backward()
    for handle in handles:
        handle.remove()


CASES = {
    "checkpoint": Case(lambda: Checkpointed(False), vectors(6)),
    "checkpoint, reentrant": Case(lambda: Checkpointed(True), vectors(6)),
    "clip by norm": Case(mlp, vectors(6), step=clip_norm),
    "clip by value": Case(mlp, vectors(6), step=clip_value),
    "gradient penalty": Case(mlp, vectors(6), step=input_penalty),
    "create_graph": Case(mlp, vectors(6), step=create_graph),
    "accumulation, no_sync": Case(mlp, vectors(6), step=halves(True, False)),
    "accumulation, no_sync, forward outside": Case(mlp, vectors(6), step=halves(True, True)),
    "accumulation": Case(mlp, vectors(6), step=halves(False, False)),
    "backward(inputs)": Case(mlp, vectors(6), step=only_some),
    "retain_graph": Case(mlp, vectors(6), step=retained),
    "autograd.grad before": Case(mlp, vectors(6), step=looks_first),
    "evaluation between": Case(mlp, vectors(6), step=evaluates),
    "user hooks": Case(mlp, vectors(6), step=adds_hooks),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    assert_equals_one_process(CASES[name], comm, sizes)
