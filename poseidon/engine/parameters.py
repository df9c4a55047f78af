"""What the planner must know of a model, and a trial of it without memory or arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree

from poseidon.engine.capture import Factors, Record, attach, can_capture, self_test
from poseidon.engine.embedding import attach_rows, can_record_rows
from poseidon.engine.rows import Rows
from poseidon.errors import UserError
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
    linear, embeddings = _layers(model)
    counted = {key for key, modules in embeddings.items() if any(module.scale_grad_by_freq for module in modules)}
    params, infos = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        path, module = owners[id(p)]
        factors: Literal["rows", "linear"] | None = (
            "rows" if id(p) in embeddings else "linear" if id(p) in linear else None
        )
        params.append(p)
        infos.append(
            Param(
                name,
                path,
                type(module).__name__,
                tuple(p.shape),
                str(p.dtype),
                p.dtype.itemsize,
                factors,
                id(p) in counted,
            )
        )
    return params, infos


def _layers(model: nn.Module) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    """By id of the weight, the plain Linear layers and the embeddings that have it.

    A weight of both (a tied head) counts as the embedding's: its rows may have to be divided by how often they were
    looked up, and what the head adds is a dense gradient to them.
    """
    linear: dict[int, list[Any]] = {}
    embeddings: dict[int, list[Any]] = {}
    for module in model.modules():
        if can_capture(module):
            linear.setdefault(id(module.weight), []).append(module)
        elif can_record_rows(module):
            embeddings.setdefault(id(module.weight), []).append(module)
    return {key: modules for key, modules in linear.items() if key not in embeddings}, embeddings


def held(module: nn.Module) -> list[nn.Parameter]:
    """A module's own parameters, without a look at them (see :class:`poseidon.engine.watched.Watched`)."""
    params: Any = module._parameters
    return [p for p in (dict.values(params) if isinstance(params, dict) else params.values()) if p is not None]


def whole_is_compiled(model: nn.Module) -> bool:
    """By ``torch.compile(model)`` or ``model.compile()``."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def record_factors(model: nn.Module, params: Sequence[nn.Parameter], *, linear: bool = True) -> dict[int, Record]:
    """Let every plain embedding record its rows, and if `linear`, every plain Linear layer its factors.

    Returns:
        By index of the weight in ``params``; to be closed.
    """
    indices = {id(p): index for index, p in enumerate(params)}
    records: dict[int, Record] = {}
    linears, embeddings = _layers(model)
    for key, modules in embeddings.items():
        if key in indices:
            rows = records[indices[key]] = Rows(params[indices[key]])
            for module in modules:
                attach_rows(module, rows)
    for key, modules in linears.items() if linear else ():
        if key in indices:
            factors = records[indices[key]] = Factors(params[indices[key]])
            for module in modules:
                attach(module, factors)
    return records


def observe(model: nn.Module, forward: Callable[[], Any]) -> dict[str, FactorSize]:
    """The factors that one backward pass gives, by name of the weight: what iteration 0 would tell the planner.

    Works on the meta device, where it costs neither memory nor arithmetic. Leaves the model as it was. Of an embedding
    it tells the most rows that can be touched, min(indices looked up, rows of the weight): inputs of a trial have no
    values, or none that mean anything; the engine counts different ones.

    Args:
        forward: runs the model once, with grad; all tensors in what it returns go into the gradient.
    """
    if not self_test():
        return {}
    params, infos = trainable(model)
    kept = [p.grad for p in params]
    for p in params:
        p.grad = None
    records = record_factors(model, params)
    try:
        with torch.enable_grad():
            outputs = [t for t in tensors_in(forward()) if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        return {
            infos[index].name: _size(record)
            for index, record in records.items()
            if record.factors and params[index].grad is None
        }
    finally:
        for record in records.values():
            record.factors.clear()
            record.close()
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


def _size(record: Record) -> FactorSize:
    if isinstance(record, Rows):
        return FactorSize(min(record.looked_up, record.weight.shape[0]), record.weight.itemsize)
    return FactorSize(sum(u.shape[0] for u, _ in record.factors), record.factors[0][0].itemsize)


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Tensors in nested containers, and in the attributes of objects that are no containers (dataclasses ...)."""
    found: list[torch.Tensor] = []
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            found += [t for value in vars(leaf).values() for t in _pytree.tree_leaves(value) if torch.is_tensor(t)]
    return found


def check_distributable(model: nn.Module, where: torch.device) -> None:
    """Refuses what the engine cannot hold.

    Args:
        where: the session's device.

    Raises:
        UserError: names the parameter, buffer or layer, and says what to do.
    """
    for name, p in model.named_parameters():
        if p.device != where:
            raise UserError(
                f"parameter {name} is on {p.device}, but this session's device is {where}: call "
                "model.to(session.device) before distribute()"
            )
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise UserError(
                f"parameter {name} has no shape yet (a lazy module): run one forward pass before distribute()"
            )
        if p.requires_grad and not p.is_leaf:
            raise UserError(f"parameter {name} is not a leaf of the graph: detach it before distribute()")
    for name, buffer in model.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise UserError(f"buffer {name} has no shape yet (a lazy module): run one forward pass before distribute()")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"layer {name} is a torch.nn.SyncBatchNorm, which needs CUDA: call poseidon.sync_batchnorm(model) first"
            )
