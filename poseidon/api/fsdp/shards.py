"""Whole tensors and their parts, and optimizers that step parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from poseidon.engine.backward import Hook
from poseidon.errors import UserError


def cut(value: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's rows of a whole tensor that every rank has. No traffic."""
    mesh = like.device_mesh
    parts = value.detach().to(like.dtype).chunk(mesh.size())
    rank = mesh.get_local_rank()
    part = parts[rank].to(like.device).clone() if rank < len(parts) else like.to_local().new_empty(0, *value.shape[1:])
    return DTensor.from_local(
        part, mesh, like.placements, run_check=False, shape=value.shape, stride=value.contiguous().stride()
    )


def full(value: Any) -> Any:
    """Collective: all ranks' rows of a parameter or its optimizer state; anything else as it is."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


#: Of torch's optimizers, those whose steps DTensor does not know (2.14), and those that it knows fused.
_UNABLE = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.SparseAdam)
_ABLE_FUSED = (torch.optim.Adam, torch.optim.AdamW)


class Optimizers:
    """Optimizers of a plain model, pointed at its parts and back.

    Raises:
        UserError: an optimizer cannot step parts, or its state cannot be cut into rows.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
        self._optimizers = optimizers
        self._kept: list[dict[int, dict[str, Any]]] | None = None  # whole states, by optimizer and parameter's number
        names = {id(p): name for name, p in model.named_parameters()}
        for optimizer in optimizers:
            _check_able(optimizer)
            for p in _params(optimizer):
                if id(p) in names:
                    _check_state(optimizer, names[id(p)], p)

    @property
    def kept(self) -> bool:
        return self._kept is not None

    def point_at(self, parts: Mapping[int, Any]) -> None:
        """Step these instead of the whole parameters, given by their ids; groups and their settings stay."""
        for optimizer in self._optimizers:
            for p in _replace(optimizer, parts):
                state, part = optimizer.state.pop(p, None), parts[id(p)]
                if state is not None:
                    optimizer.state[part] = {
                        key: cut(value, part) if is_row_state(value, p) else value for key, value in state.items()
                    }

    def point_back(self, wholes: Mapping[int, nn.Parameter]) -> None:
        """The inverse, after :meth:`keep`."""
        assert self._kept is not None
        for optimizer, kept in zip(self._optimizers, self._kept, strict=True):
            numbers = {id(part): number for number, part in enumerate(_params(optimizer))}
            for part in _replace(optimizer, wholes):
                if optimizer.state.pop(part, None) is not None:
                    optimizer.state[wholes[id(part)]] = kept[numbers[id(part)]]

    def keep(self) -> None:
        """Collective: states as wholes, for a ``state_dict()`` of one rank alone until the next step."""
        self._kept = [
            {
                number: {key: full(value) for key, value in optimizer.state[p].items()}
                for number, p in enumerate(_params(optimizer))
                if p in optimizer.state
            }
            for optimizer in self._optimizers
        ]

    def drop(self) -> None:
        self._kept = None

    def hook(self, stepped: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Gives what undoes it."""
        for index, optimizer in enumerate(self._optimizers):
            yield optimizer.register_step_post_hook(Hook(lambda *_: stepped())).remove
            yield optimizer.register_state_dict_post_hook(Hook(self._saver(index))).remove
            yield optimizer.register_load_state_dict_pre_hook(Hook(_load)).remove

    def _saver(self, index: int) -> Callable[..., None]:
        def save(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            if not any(isinstance(value, DTensor) for each in state_dict["state"].values() for value in each.values()):
                return
            if self._kept is None:
                raise UserError(
                    "comm='fsdp': each rank has a part of the optimizer's state; call session.synchronize() on all "
                    "ranks before state_dict()"
                )
            state_dict["state"] = state_dict["state"] | self._kept[index]

        return save


def _load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The part of a whole state that is this rank's."""
    parts = dict(enumerate(_params(optimizer)))

    def fit(number: int, value: Any) -> Any:
        part = parts.get(number)
        return cut(value, part) if isinstance(part, DTensor) and is_row_state(value, part) else value

    states = {n: {key: fit(n, value) for key, value in each.items()} for n, each in state_dict["state"].items()}
    return {**state_dict, "state": states}


def _replace(optimizer: torch.optim.Optimizer, new: Mapping[int, nn.Parameter]) -> list[Any]:
    """Returns the parameters that are replaced."""
    replaced = [p for p in _params(optimizer) if id(p) in new]
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(p), p) for p in group["params"]]  # some keep the list itself
    return replaced


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    """In the order in which a ``state_dict`` numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_row_state(value: Any, p: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Is it a whole tensor with a row for each of the parameter's?"""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == p.shape


def _check_able(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, _UNABLE):
        raise UserError(f"comm='fsdp': PyTorch's {name} cannot step sharded parameters: take another, or comm='ddp'")
    if not isinstance(optimizer, _ABLE_FUSED) and any(group.get("fused") for group in optimizer.param_groups):
        raise UserError(f"comm='fsdp': {name} cannot step sharded parameters with fused=True: leave it out")


def _check_state(optimizer: torch.optim.Optimizer, name: str, p: nn.Parameter) -> None:
    for key, value in optimizer.state.get(p, {}).items():
        scalar = not isinstance(value, (torch.Tensor, dict, list, tuple)) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        )
        if not scalar and not is_row_state(value, p):
            shape = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(
                f"comm='fsdp' cannot cut {type(optimizer).__name__}'s state {key} ({shape}) of {name} into rows: "
                f"call distribute() before the optimizer's first step, or take comm='ddp'"
            )
