"""What of a model FSDP gathers and reduces as one, and which models it cannot shard."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from poseidon.errors import UserError

#: Modules up to so many times the smallest unit are one: a block of a network, where layers are small.
LARGEST = 16


def units_of(model: nn.Module, least_bytes: int, *, blocks: bool = True) -> list[nn.Module]:
    """The modules that become units of their own, children before their parents; the root's unit takes the rest.

    FSDP hides a unit's traffic under the computation of others, so that units should be small; but each costs two
    collectives and some Python, about 2 ms on a CPU (1 MiB on a link of 4 Gbit/s). So a module becomes a unit if it
    has from `least_bytes` to :data:`LARGEST` x `least_bytes` of parameters, or if it has more and cannot be split up;
    of a module that is split, what is too small goes with its parent. No unit is a module

    - parts or parameters of which are used elsewhere too: FSDP wants all that share one in one unit, and would reduce
      after each use;
    - that nobody calls: FSDP gathers in a forward hook, and attention or a parametrization reads its parts' weights.

    Args:
        blocks: False: of modules that are called only those that own parameters (an emulated model's blocks are not).
    """
    tree = _Tree(model, blocks)
    most_bytes = LARGEST * least_bytes if blocks else 0
    units: list[nn.Module] = []
    if tree.bytes(model, units) > most_bytes:
        _split(model, tree, least_bytes, most_bytes, units)
    return units


def _split(module: nn.Module, tree: _Tree, least_bytes: int, most_bytes: int, units: list[nn.Module]) -> None:
    for part in () if isinstance(module, nn.MultiheadAttention) else module.children():
        if part in units:
            continue
        if not tree.whole(part) or tree.bytes(part, units) > most_bytes:
            _split(part, tree, least_bytes, most_bytes, units)
        if tree.whole(part) and tree.bytes(part, units) >= max(1, least_bytes):
            units.append(part)


class _Tree:
    """Who holds what in a model."""

    def __init__(self, model: nn.Module, blocks: bool) -> None:
        self._blocks = blocks
        self._holders: dict[int, set[nn.Module]] = {}  # of parameters and modules, by id
        for module in model.modules():
            for held in (*module._parameters.values(), *module._modules.values()):
                if held is not None:
                    self._holders.setdefault(id(held), set()).add(module)

    def whole(self, module: nn.Module) -> bool:
        """Can it be a unit: is it called, at one place, and is nothing in it used elsewhere?"""
        parts = set(module.modules())
        if len(self._holders[id(module)]) > 1:
            return False
        if not self._blocks and not any(p is not None for p in module._parameters.values()):
            return False
        inside = [*parts - {module}, *module.parameters()]
        called = type(module).forward is not nn.Module.forward and not isinstance(module, ParametrizationList)
        return called and all(self._holders[id(held)] <= parts for held in inside)

    @staticmethod
    def bytes(module: nn.Module, units: list[nn.Module]) -> int:
        """Of its parameters that are not in `units`."""
        taken = {id(p) for unit in units for p in unit.parameters()}
        return sum(p.nbytes for p in module.parameters() if id(p) not in taken)


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
