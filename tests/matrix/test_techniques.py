"""Every technique of training, against one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix.harness import COMMS, SIZES, Case, assert_equals_one_process, images, mean_square, vectors
from tests.ranks import checkpoint

#: PyTorch's forward-mode differentiation is one for all threads.
FORWARD_MODE = threading.Lock()


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


def by_position(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Input of (positions, rows, features): the first dimension is not the row."""
    x = inputs[0].transpose(0, 1)
    if session is not None:
        session.rows(x.shape[1])
    mean_square(model(x).transpose(0, 1), number).backward()


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


def looks_elsewhere(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Gradients of other rows, with respect to weights or input, are no part of the step (saliency, influence)."""
    others = torch.zeros(11 if session is None else 3 + 4 * session.rank, 6, requires_grad=True)
    torch.autograd.grad(model(others).sum(), [others, *model.parameters()])
    mean_square(model(*inputs), number).backward()


def looks_by_row(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Per-row gradients by torch.func, then the step."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (row[None],)).square().sum()

    (x,) = inputs
    per_row = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
    assert per_row["0.weight"].shape == (len(x), 8, 6)
    mean_square(model(x), number).backward()


def looks_by_transform(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Jacobians and directional derivatives by torch.func, at other rows, then the step."""
    others = torch.ones(11 if session is None else 3 + 4 * session.rank, 6)
    with FORWARD_MODE:
        torch.func.jvp(model, (others,), (others,))
    torch.func.vmap(torch.func.jacrev(model))(others)
    torch.func.vjp(model, others)[1](torch.ones(len(others), 4))
    mean_square(model(*inputs), number).backward()


def by_functional_call(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    mean_square(torch.func.functional_call(model, dict(model.named_parameters()), inputs), number).backward()


def of_another_loss(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """A forward whose loss is thrown away."""
    model(torch.ones(9 if session is None else 2 + session.rank, 6)).sum()
    mean_square(model(*inputs), number).backward()


def teacher(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """The model itself, without grad, gives the target (self-distillation); more rows than the step has."""
    with torch.no_grad():
        target = model(torch.cat([inputs[0] + 0.1, inputs[0]]))[: len(number)]
    mean_square(model(*inputs) - target, number).backward()


def sharpness_aware(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """SAM: two backward passes, the second at weights moved along the first one's gradient."""
    mean_square(model(*inputs), number).backward()
    moves = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    mean_square(model(*inputs), number).backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)


def clips_weights(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """As a WGAN's critic; then all weights are written anew from one vector."""
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)
    with torch.no_grad():
        model[0].weight.mul_(0.9)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
    mean_square(model(*inputs), number).backward()


def one_buffer(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """All gradients are views of one vector of the user's."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    mean_square(model(*inputs), number).backward()
    together = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.equal(flat, together)


def freezes(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """A layer is frozen after distribute(), for good."""
    model[2].requires_grad_(False)
    mean_square(model(*inputs), number).backward()


def watched(context: Any) -> Any:
    """Under what people use to debug and to save memory."""

    def step(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
        with context():
            mean_square(model(*inputs), number).backward()

    return step


def adds_hooks(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Linear user hooks on parameters, and hooks on modules."""
    handles = [
        model[0].weight.register_hook(lambda grad: grad * 2),
        model[0].bias.register_hook(lambda grad: grad * 3),
        model[2].weight.register_post_accumulate_grad_hook(lambda p: None),
        model[2].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,)),
        model[4].register_forward_hook(lambda module, args, out: out * 3),
    ]
    mean_square(model(*inputs), number).backward()
    for handle in handles:
        handle.remove()


def doubles(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def sgd_and_hooks(model: Any) -> torch.optim.Optimizer:
    """Hooks that are there before the engine's."""
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[2].weight.register_post_accumulate_grad_hook(doubles)
    model[2].register_full_backward_pre_hook(lambda module, grad: (grad[0] * 0.5,))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, out: out + 1)
    return sgd(model)


def hooks_afterwards(model: Any) -> Any:
    model[2].weight.register_post_accumulate_grad_hook(doubles)
    model[4].bias.register_post_accumulate_grad_hook(doubles)
    return model


def saved_on_disk() -> Any:
    """Whatever autograd saves is packed and unpacked."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


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
    "user hooks from before": Case(mlp, vectors(6), optimizer=sgd_and_hooks),
    "user hooks from afterwards": Case(mlp, vectors(6), after=hooks_afterwards),
    "sequence first": Case(mlp, images(4, 6), step=by_position),
    "autograd.grad of other rows": Case(mlp, vectors(6), step=looks_elsewhere),
    "torch.func, functional": Case(mlp, vectors(6), step=looks_by_row),
    "torch.func of the model": Case(mlp, vectors(6), step=looks_by_transform),
    "functional_call": Case(mlp, vectors(6), step=by_functional_call),
    "a loss thrown away": Case(mlp, vectors(6), step=of_another_loss),
    "teacher": Case(mlp, vectors(6), step=teacher),
    "sharpness-aware": Case(mlp, vectors(6), step=sharpness_aware),
    "weights clipped and rewritten": Case(mlp, vectors(6), step=clips_weights),
    "gradients in one buffer": Case(mlp, vectors(6), step=one_buffer),
    "frozen afterwards": Case(mlp, vectors(6), step=freezes),
    "anomaly detection": Case(mlp, vectors(6), step=watched(torch.autograd.detect_anomaly)),
    "saved tensors packed": Case(mlp, vectors(6), step=watched(saved_on_disk)),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    assert_equals_one_process(CASES[name], comm, sizes)
