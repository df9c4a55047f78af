"""What of a model FSDP gathers and reduces as one, and which models it cannot shard."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from poseidon.errors import UserError


def units_of(model: nn.Module, least_bytes: int) -> list[nn.Module]:
    """The layers that become units of their own, a module's children before it; the root's unit takes the rest.

    A unit is a module that owns parameters itself: FSDP hides a unit's traffic under other units' computation, so the
    finer the better, until the two collectives that each costs take longer than its bytes. Not those below:

    - smaller ones than `least_bytes` (norms, first convolutions): together they are one message of the root's;
    - that share a parameter with a module elsewhere: FSDP wants all that share it in one unit;
    - that nobody calls: FSDP gathers in a forward hook, and attention or a parametrization reads its parts' weights.
    """
    owners = _owners(model)
    below = {part for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in m.modules()} - {
        m for m in model.modules() if isinstance(m, nn.MultiheadAttention)
    }
    units: list[nn.Module] = []
    taken: set[int] = set()
    for module in reversed([*model.modules()][1:]):
        parts = set(module.modules())
        params = [p for p in module.parameters() if id(p) not in taken]
        if (
            not any(p is not None for p in module._parameters.values())
            or module in below
            or isinstance(module, ParametrizationList)
            or type(module).forward is nn.Module.forward  # a ParameterList ...
            or sum(p.nbytes for p in params) < least_bytes
            or not all(owners[id(p)] <= parts for p in params)
        ):
            continue
        units.append(module)
        taken |= {id(p) for p in params}
    return units


def _owners(model: nn.Module) -> dict[int, set[nn.Module]]:
    """Modules that hold it, by id of a parameter."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), set()).add(module)
    return owners


def check_shardable(model: nn.Module, units: list[nn.Module]) -> None:
    """Refuses what FSDP2 cannot hold, or would get wrong without a word.

    Raises:
        UserError: names the parameter, buffer or layer, and says what to do.
    """
    for name, module in model.named_modules():
        _check_module(f"layer {name}" if name else "the model", module)
    for name, p in model.named_parameters():
        _check_parameter(name, p)
    for name, buffer in model.named_buffers():
        if isinstance(buffer, UninitializedBuffer):
            raise UserError(f"buffer {name} has no shape yet (a lazy module): run one forward pass before distribute()")
    names = {id(p): name for name, p in model.named_parameters()}
    taken: set[int] = set()
    for unit in (*units, model):
        first: nn.Parameter | None = None
        for p in unit.parameters():
            if id(p) in taken or not p.requires_grad:
                continue
            first = first if first is not None else p
            if p.dtype != first.dtype:
                raise UserError(
                    f"comm='fsdp' reduces gradients of one type as one, but {names[id(first)]} has {first.dtype} and "
                    f"{names[id(p)]} has {p.dtype}: make them one type, or take comm='ddp'"
                )
        taken |= {id(p) for p in unit.parameters()}


def _check_module(where: str, module: nn.Module) -> None:
    if isinstance(module, FSDPModule):
        raise UserError(f"{where} is sharded already: give session.distribute() the plain model")
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(f"{where} is a ScriptModule, which comm='fsdp' cannot shard: take comm='ddp'")
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise UserError(f"{where} is compiled: comm='fsdp' needs it as it was before torch.compile; or take comm='ddp'")
    if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise UserError(f"{where} gives sparse gradients, which comm='fsdp' cannot reduce: drop sparse=True")


def _check_parameter(name: str, p: nn.Parameter) -> None:
    instead = "or take comm='ddp'"
    if isinstance(p, UninitializedParameter):
        raise UserError(f"parameter {name} has no shape yet (a lazy module): run one forward pass before distribute()")
    if isinstance(p, DTensor):
        raise UserError(f"parameter {name} is a DTensor already: give session.distribute() the plain model")
    if p.dim() == 0:
        raise UserError(
            f"parameter {name} is a single number without a dimension, which FSDP cannot cut: {instead[3:]}"
        )
    if not p.is_contiguous():
        raise UserError(f"parameter {name} is not contiguous, as comm='fsdp' needs it: call .contiguous(), {instead}")
    if p.is_complex():
        raise UserError(f"parameter {name} is complex, which gloo cannot reduce for comm='fsdp': {instead[3:]}")
    if p.requires_grad and not p.is_leaf:
        raise UserError(f"parameter {name} is not a leaf of the graph: detach it before distribute()")
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        raise UserError(
            f"parameter {name} has hooks, and comm='fsdp' puts another parameter in its place: register them after "
            f"distribute(), {instead}"
        )
