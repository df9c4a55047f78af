"""A model whose layers take an accelerator's time instead of computing; its parameters are real in name and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from poseidon.config.density import FactorDensity
from poseidon.emulation.accelerator import Accelerator, product_seconds
from poseidon.emulation.layers import LayerTime
from poseidon.engine.capture import Factors, backward_mode, recorder
from poseidon.engine.rows import Rows
from poseidon.schemes import Touched

Tensor = torch.Tensor


def emulate(
    model: nn.Module,
    calls: Sequence[LayerTime],
    accelerator: Accelerator,
    densities: Mapping[str, FactorDensity] | None = None,
) -> nn.Module:
    """Turns `model` into one that sleeps, in place.

    Classes, names, shapes and sharing of parameters stay, so that engine, DDP and FSDP see what they would see. The
    forward pass runs the layers in order, whatever branches there were; it returns one number with a gradient.

    Args:
        model: on any device, the meta device included.
        calls: of its layers in a forward pass, in order.
        densities: share of non-zeros in the factors of linear layers, by their path; else all.

    Returns:
        `model` itself, on the CPU.
    """
    _give_memory(model, accelerator)
    chain = []
    for call in calls:
        module = model.get_submodule(call.layer)
        density = (densities or {}).get(call.layer, FactorDensity())
        layer = _Layer(call, module, [_place(model, name) for name in call.params], accelerator, density)
        if module is not model:
            module.forward = _run  # hooks of engine, DDP and FSDP stand around it
        chain.append((module, layer))
    model.forward = partial(_run_all, model, chain, accelerator)
    return model


def _give_memory(model: nn.Module, accelerator: Accelerator) -> None:
    """Parameters share theirs; buffers are small and have their own."""
    made: dict[int, nn.Parameter] = {}
    for p in sorted(model.parameters(), key=lambda p: -p.numel()):
        made[id(p)] = nn.Parameter(accelerator.tensor(p.shape, p.dtype), requires_grad=p.requires_grad)
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                module._parameters[name] = made[id(old)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


Place = tuple[nn.Module, str]


def _place(model: nn.Module, name: str) -> Place:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


@dataclass(eq=False)
class _Layer:
    """One call of a layer, and what its gradients are made of."""

    time: LayerTime
    module: nn.Module
    places: list[Place]
    accelerator: Accelerator
    density: FactorDensity

    def factors(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """u and v of a round, as sparse as they are to be."""
        rows = self.time.rows or 0
        found = tuple(
            self.accelerator.sparse(rows * width, share).view(rows, width)
            for width, share in zip(weight.shape, self.density, strict=True)
        )
        return found[0], found[1]

    def record(self, token: Tensor) -> Any:
        """Where the engine wants factors or rows of this call; None: a dense gradient."""
        return recorder(self.module, token) if self.time.rows or self.time.indices else None


def _run(token: Tensor, layer: _Layer) -> Tensor:
    """In place of the module's own forward."""
    params = [module._parameters[name] for module, name in layer.places]
    result: Tensor = _Call.apply(token, layer, layer.record(token), *params)
    return result


def _run_all(
    model: nn.Module, chain: list[tuple[nn.Module, _Layer]], accelerator: Accelerator, *args: Any, **kwargs: Any
) -> Tensor:
    accelerator.ready()
    token = torch.zeros((), requires_grad=torch.is_grad_enabled())
    for module, layer in chain:
        token = _run(token, layer) if module is model else module(token, layer)
    return token


class _Call(torch.autograd.Function):
    """Sleeps; its backward pass gives gradients of the parameters, or what the engine records instead."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, layer: _Layer, record: Any, *params: Tensor) -> Tensor:
        ctx.layer, ctx.record, ctx.params = layer, record, params
        layer.accelerator.compute(layer.time.forward, "forward", layer.time.layer)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer, record = ctx.layer, ctx.record
        seconds, recorded = layer.time.backward, None
        if record is not None and backward_mode(record) == "factors":
            recorded = record.weight
            if isinstance(record, Factors):
                record.factors.append(layer.factors(recorded))
                seconds -= product_seconds(layer.time)
            elif isinstance(record, Rows):
                record.add(_touched(recorded, layer), layer.time.indices)
        layer.accelerator.compute(seconds, "backward", layer.time.layer)
        wanted = [p if needed else None for p, needed in zip(ctx.params, ctx.needs_input_grad[3:], strict=True)]
        dense = (None if p is None or p is recorded else layer.accelerator.tensor(p.shape, p.dtype) for p in wanted)
        return grads[0], None, None, *dense


def _touched(weight: Tensor, layer: _Layer) -> Touched:
    """As many rows as may be different ones."""
    rows = min(layer.time.indices or 0, weight.shape[0])
    return Touched(torch.arange(rows), weight.detach()[:rows], strided=not getattr(layer.module, "sparse", False))


class EmulatedOptimizer(torch.optim.Optimizer):
    """Takes an optimizer step's time, and changes nothing; for some parameters, their share of it. No time without a
    gradient: a server has stepped."""

    by_parameter = True

    def __init__(self, params: Any, accelerator: Accelerator, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})
        self._accelerator = accelerator
        self._numel = sum(p.numel() for group in self.param_groups for p in group["params"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        params = [p for group in self.param_groups for p in group["params"]]
        if any(p.grad is not None for p in params):
            self._accelerator.step(sum(p.numel() for p in params) / self._numel)
        return loss
