"""Optimizers of which some parameters can be stepped, then others, as if all were at once."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any, SupportsIndex

import torch
from torch.optim import optimizer as torch_optimizer

from poseidon.engine.backward import Hook
from poseidon.engine.settings import Settings
from poseidon.engine.slices import ELEMENTWISE

#: Of torch.optim's, those that update every parameter by itself.
_BY_PARAMETER = (*ELEMENTWISE, "Adafactor", "Muon", "SparseAdam")


def _by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Does stepping some parameters, then others, give the bits of one step of all?

    One of the user's own says so by ``by_parameter = True`` in its class; it must step without parameters, too.
    """
    kind = type(optimizer)
    known = kind.__name__ in _BY_PARAMETER and kind is getattr(torch.optim, kind.__name__, None)
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return (known and not differentiable) or bool(kind.__dict__.get("by_parameter"))


def _hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Are there hooks around its steps, other than the engine's own for all optimizers?"""
    everywhere = len(torch_optimizer._global_optimizer_pre_hooks) > 1 or torch_optimizer._global_optimizer_post_hooks
    return bool(everywhere or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def unfit(optimizer: torch.optim.Optimizer) -> str | None:
    """Why its steps must be made as a whole, and when they are called; None: they need not."""
    if not _by_parameter(optimizer):
        return f"{type(optimizer).__name__} is not known to update each parameter by itself"
    if _hooked(optimizer):
        return "the optimizer's step has hooks (clipping?)"
    return None


def step(optimizer: torch.optim.Optimizer, settings: Settings, only: Container[int]) -> None:
    """With those settings, the parameters with these ids."""
    settings.enter(only)
    try:
        type(optimizer).step(optimizer)
    finally:
        settings.leave()


def empty(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Of its class, without parameters: stepping it changes nothing."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return other


def before_reads(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> list[Callable[[], object]]:
    """Have `call` run before an optimizer's state is taken, loaded, copied or pickled; gives what undoes that."""
    hook = Hook(lambda *_: call())
    handles = optimizer.register_state_dict_pre_hook(hook), optimizer.register_load_state_dict_pre_hook(hook)

    def reduce(protocol: SupportsIndex) -> Any:
        call()
        return type(optimizer).__reduce_ex__(optimizer, protocol)

    # copy and pickle look there, in the object before its class. What a copy has of it is torch's to say: not this.
    vars(optimizer)["__reduce_ex__"] = reduce
    return [*(handle.remove for handle in handles), partial(vars(optimizer).pop, "__reduce_ex__", None)]
