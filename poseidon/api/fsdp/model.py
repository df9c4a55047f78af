"""A model under FSDP2 (``torch.distributed.fsdp.fully_shard``).

FSDP2 replaces parameters: between steps a rank has some rows of each (a DTensor), and the optimizer steps those; a
forward pass gathers them, the backward pass reduces the gradients and scatters their rows. What differs from calling
``fully_shard`` yourself, and why:

- Parameters stay after the forward pass (``reshard_after_forward=False``): bytes and memory compare with DDP's.
- All gathers start with the forward pass and are waited for unit by unit; FSDP2 on the CPU has no streams, and would
  gather a unit when it is needed. Its reductions on the CPU: see :mod:`poseidon.api.fsdp.collectives`.
- At start all take rank 0's values, as under DDP; FSDP2 would make one model of rows of different ones.
- After ``session.synchronize()`` the model has its own parameters again, whole and with the present values, so that any
  rank alone may evaluate or save, until the next optimizer step or forward pass to train. (FSDP2's gathered ones would
  not do: their memory comes and goes.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from poseidon.api.fsdp.collectives import Collectives
from poseidon.api.fsdp.shards import Optimizers, cut, full, is_row_state
from poseidon.api.fsdp.traces import Traces
from poseidon.api.fsdp.units import check_shardable, units_of
from poseidon.engine import Device
from poseidon.engine.backward import Hook
from poseidon.engine.reference import Reference
from poseidon.errors import UserError
from poseidon.planning import sharded_bytes
from poseidon.tracing import Tracer


class FSDP(Reference):
    """One model under FSDP2. Collective.

    Args:
        least_bytes: layers smaller than this share a unit.

    Raises:
        UserError: this model or optimizer cannot be sharded; nothing has been changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        least_bytes: int,
        accelerator: Device,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._model: Any = model
        self._units: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._whole = self._closed = False
        if not any(p.requires_grad for p in model.parameters()):
            return
        units = units_of(model, least_bytes, blocks=accelerator.has_values)
        check_shardable(model, units)
        self._optimizers = Optimizers(optimizers, model)
        # An in-place operation on it would drop a hook that gathers for the backward pass: here nothing is to gather.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        if accelerator.has_values:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
        sizes = [(tuple(p.shape), p.itemsize, p.requires_grad) for p in model.parameters()]
        self.bytes = sharded_bytes(sizes, dist.get_world_size())
        self._shard([*units, model], device, accelerator)
        self._hook()

    def _shard(self, units: Sequence[nn.Module], device: torch.device, accelerator: Device) -> None:
        model = self._model
        self._places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        traces = Traces(model)
        self._undo.append(traces.erase)
        everyone = dist.group.WORLD
        assert everyone is not None
        mesh = DeviceMesh.from_group(everyone, device.type)
        for unit in units:
            sharded: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            # None but its own: FSDP2 would gather for the unit before it in the list of forward passes, evaluations on
            # this rank alone included, which others do not.
            sharded.set_modules_to_backward_prefetch([sharded])
        self._units = [m for m in model.modules() if m in set(units)]
        model._get_fsdp_state()._lazy_init()
        traces.note()
        self._parts = {id(p): module._parameters[name] for module, name, p in self._places}
        self._optimizers.point_at(self._parts)
        if device.type == "cpu":
            self._communicate(units, Collectives(accelerator, self._tracer))
        #: Units in the order of their forward passes, and those that others read without one; None before the first.
        self._order: list[Any] | None = None
        self._called: list[Any] = []

    def _communicate(self, units: Sequence[nn.Module], collectives: Collectives) -> None:
        left = {id(part): part for part in self._parts.values()}
        names = {module: name for name, module in self._model.named_modules()}
        for unit in units:
            own = [left.pop(id(p)) for p in unit.parameters() if id(p) in left]
            collectives.install(unit, names[unit], own)

    def _hook(self) -> None:
        model = self._model
        handles = [
            model.register_forward_pre_hook(Hook(self._before_forward), prepend=True),
            model.register_forward_hook(Hook(self._after_forward)),
            model.register_state_dict_post_hook(lambda *args: self._saved(*args)),  # torch wants a function
            model.register_load_state_dict_pre_hook(Hook(self._loading)),
            *(unit.register_forward_pre_hook(Hook(self._note)) for unit in self._units),
        ]
        self._undo += [handle.remove for handle in handles]
        self._undo += self._optimizers.hook(self._stepped)
        model.zero_grad = Hook(self._zero_grad)
        self._undo.append(lambda: vars(model).pop("zero_grad", None))

    # --- training ----------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._closed:
            raise UserError(
                "the session of this model is closed: call session.undistribute(model) before that, on all ranks"
            )
        if not torch.is_grad_enabled():
            if not self._whole:
                self._gather(self._units, self._units)
            return
        if self._whole:
            self._cut()
        self._called.clear()
        self._gather(self._order or self._units, self._units if self._order is None else self._read)

    def _gather(self, units: Sequence[Any], awaited: Sequence[Any]) -> None:
        """Collective, as far as they are not there. All leave at once; FSDP waits for those not `awaited` here."""
        with torch.inference_mode(False):
            for unit in units:
                unit.unshard(async_op=True)
            for unit in awaited:
                unit.unshard()

    def _note(self, unit: nn.Module, args: Any) -> None:
        if self._order is None and unit not in self._called:
            self._called.append(unit)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the first forward pass to train: which units have been called, and in which order?"""
        if self._order is None and torch.is_grad_enabled():
            self._read = [unit for unit in self._units if unit not in self._called]
            self._order = [*self._read, *self._called]

    def _stepped(self) -> None:
        """Whole parameters that there are do not have the step."""
        self._optimizers.drop()
        self._cut()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """As the model's own, also while it shows whole parameters."""
        for p in {id(p): p for p in (*self._model.parameters(), *self._parts.values())}.values():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_().zero_()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Parameters stay whole, too: micro-batches before the last cost no traffic."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        if self._units:
            self._model.set_requires_gradient_sync(sync)
            self._model.set_reshard_after_backward(sync)

    # --- whole parameters --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _show(self) -> None:
        """Collective, unless they are there: the model's own parameters, with the present values."""
        if self._whole or not self._units:
            return
        self._gather(self._units, self._units)
        for module, name, p in self._places:
            gathered = module._parameters[name]
            p.requires_grad_(gathered.requires_grad).copy_(gathered)
        for module, name, p in self._places:
            setattr(module, name, p)  # some modules want to know
        self._whole = True

    def _cut(self) -> None:
        """Each rank has its rows only."""
        if self._whole:
            for _, _, p in self._places:
                self._parts[id(p)].requires_grad_(p.requires_grad)
        for unit in self._units:
            unit.reshard()
        self._whole = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Collective: whole parameters inside; then as before."""
        there = self._whole
        self._show()
        try:
            yield
        finally:
            if not there:
                self._cut()

    def synchronize(self, model: nn.Module) -> None:
        """Collective: rank 0's buffers and whole parameters, for any rank alone to read until the next step."""
        self.sync_buffers(model)
        if self._units:
            self._show()
            self._optimizers.keep()

    def _saved(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if any(isinstance(value, DTensor) for value in state.values()):
            raise UserError(
                "comm='fsdp': each rank has a part of the parameters; call session.synchronize() on all ranks before "
                "state_dict()"
            )

    def _loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Of whole values, this rank's rows."""
        self._cut()
        for name, p in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(p, DTensor) and is_row_state(value, p):
                state[prefix + name] = cut(value, p)

    # --- the end -----------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Collective: the plain model that was given, with the present values."""
        if not self._units:
            return
        plain = {id(p): p for _, _, p in self._places}
        for key, part in self._parts.items():
            plain[key].grad = full(part.grad)
        self._show()
        self._optimizers.keep()
        self._restore()

    def close(self) -> None:
        """The session is over, no other rank will answer: the plain model if its values are here."""
        if self._whole and self._optimizers.kept:
            self._restore()
        self._closed = True

    def _restore(self) -> None:
        plain = {id(p): p for _, _, p in self._places}
        self._optimizers.point_back({id(part): plain[key] for key, part in self._parts.items()})
        while self._undo:
            self._undo.pop()()
        self._units = []
