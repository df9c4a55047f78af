"""Layers of real models: hooks for some iterations."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from poseidon.tracing import LayerHooks, Row, Tracer


class Slow(torch.autograd.Function):
    """Takes 5 ms forward, 20 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return grads[0]


class SlowLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Slow.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return result


def hooks_of(model: nn.Module) -> int:
    own = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return own + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_each_layer_has_its_passes_in_order_and_hooks_are_gone_afterwards() -> None:
    # An in-place activation refuses gradients of views, which a module's backward hooks would make of its input.
    model = nn.Sequential(SlowLinear(4, 8), nn.ReLU(inplace=True), nn.Sequential(SlowLinear(8, 2)))
    tracer = Tracer()
    hooks = LayerHooks(model, tracer)
    hooks.install()
    tracer.begin(1)
    model(torch.randn(3, 4)).sum().backward()
    hooks.remove()
    tracer.end()
    assert hooks_of(model) == 0
    events = [event for event in tracer.events if event.row is Row.device]
    assert [event.name for event in sorted(events, key=lambda event: event.start)] == [
        *("forward 0", "forward 1", "forward 2.0"),
        *("backward 2.0", "backward 1", "backward 0"),
    ]
    seconds = {event.name: event.end - event.start for event in events}
    assert all(seconds[f"forward {layer}"] >= 0.005 and seconds[f"backward {layer}"] >= 0.02 for layer in ("0", "2.0"))
    assert seconds["backward 1"] < 0.02


def test_a_layer_that_is_called_twice_has_two_of_each() -> None:
    layer, tracer = nn.Linear(4, 4), Tracer()
    model = nn.Sequential(layer, layer)
    hooks = LayerHooks(model, tracer)
    hooks.install()
    tracer.begin(1)
    model(torch.randn(3, 4)).sum().backward()
    hooks.remove()
    assert [event.name for event in tracer.events] == ["forward 0", "forward 0", "backward 0", "backward 0"]


def test_numbers_are_those_without_hooks() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), torch.randn(3, 4)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    hooks = LayerHooks(model, Tracer())
    hooks.install()
    model(x).sum().backward()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), plain, strict=True) if p.grad is not None)
