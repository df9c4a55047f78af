"""What the planner must know of a model, and a trial of it without memory or arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from poseidon.engine.capture import Record, attach, can_capture, self_test
from poseidon.planning import FactorSize, Param


def trainable(model: nn.Module) -> tuple[list[nn.Parameter], list[Param]]:
    """The parameters that are trained, each once, in the model's order, and their description.

    A parameter belongs to the first module that holds it.
    """
    owners: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), (path, module))
    params, infos = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        path, module = owners[id(p)]
        factors = can_capture(module) and module._parameters.get("weight") is p
        kind = type(module).__name__
        params.append(p)
        infos.append(Param(name, path, kind, tuple(p.shape), str(p.dtype), p.dtype.itemsize, factors))
    return params, infos


def fingerprint(model: nn.Module) -> list[tuple[int, bool]]:
    """What changes when a parameter is frozen, unfrozen, added, removed or replaced.

    Looked at before every forward pass: a tenth of the time of ``model.parameters()``.
    """
    found = []
    modules = [model]
    for module in modules:
        found += [(id(p), p.requires_grad) for p in module._parameters.values() if p is not None]
        modules += [child for child in module._modules.values() if child is not None]
    return found


def record_factors(
    model: nn.Module, params: Sequence[nn.Parameter]
) -> tuple[dict[int, Record], list[Callable[[], None]]]:
    """Let every plain Linear layer record its factors.

    Returns:
        (record by index of the weight in ``params``, calls that undo it)
    """
    indices = {id(p): index for index, p in enumerate(params)}
    records: dict[int, Record] = {}
    undo = []
    for module in model.modules():
        index = indices.get(id(module._parameters.get("weight")))
        if index is None or not can_capture(module):
            continue
        if index not in records:
            records[index] = Record(params[index])
        undo.append(attach(module, records[index]))  # type: ignore[arg-type]
    return records, undo


def observe(model: nn.Module, forward: Callable[[], Any]) -> dict[str, FactorSize]:
    """The factors that one backward pass gives, by name of the weight: what iteration 0 would tell the planner.

    Works on the meta device, where it costs neither memory nor arithmetic. Leaves the model as it was.

    Args:
        forward: runs the model once, with grad; all tensors in what it returns go into the gradient.
    """
    if not self_test():
        return {}
    params, infos = trainable(model)
    kept = [p.grad for p in params]
    for p in params:
        p.grad = None
    records, undo = record_factors(model, params)
    try:
        with torch.enable_grad():
            outputs = [t for t in tensors_in(forward()) if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        return {
            infos[index].name: FactorSize(sum(u.shape[0] for u, _ in record.factors), record.factors[0][0].itemsize)
            for index, record in records.items()
            if record.factors and params[index].grad is None
        }
    finally:
        for detach in undo:
            detach()
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Tensors in nested containers, and in the attributes of objects that are no containers (dataclasses ...)."""
    found: list[torch.Tensor] = []
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            found += [t for value in vars(leaf).values() for t in _pytree.tree_leaves(value) if torch.is_tensor(t)]
    return found
