"""An optimizer's state as plain JSON and tensors: what crosses the network without a pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from poseidon.engine.broadcast import broadcast
from poseidon.engine.exchange import Exchange
from poseidon.errors import UserError

#: Mailbox tag of the texts.
TAG_STATE = 5


def share_state(
    exchange: Exchange, model: int, tag: int, optimizers: Sequence[torch.optim.Optimizer], source: int = 0
) -> None:
    """Everyone takes the optimizers' state (momentum, step counts ...) of rank ``source``. Collective.

    Settings (learning rates ...) stay each rank's own; the manifest has compared them.
    """
    tensors: list[torch.Tensor] = []
    if exchange.rank == source:
        code = json.dumps([encode(_numbered(optimizer), tensors) for optimizer in optimizers])
        for peer in range(exchange.world_size):
            if peer != source:
                exchange.say(peer, model, TAG_STATE, code)
        broadcast(exchange, model, tag, tensors, "optimizer state", source)
        return
    codes = json.loads(exchange.hear(source, model, TAG_STATE, "state"))
    states = [decode(code, tensors, _place(optimizer)) for code, optimizer in zip(codes, optimizers, strict=True)]
    broadcast(exchange, model, tag, tensors, "optimizer state", source)
    for optimizer, state in zip(optimizers, states, strict=True):
        _replace(optimizer, state)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _place(optimizer: torch.optim.Optimizer) -> torch.device:
    """Of its parameters."""
    return next((p.device for p in _parameters(optimizer)), torch.device("cpu"))


def _numbered(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Its state by number of the parameter, or by whatever else an optimizer has it. Not by ``state_dict()``: that may
    be of the optimizer's own making."""
    numbers = {id(p): number for number, p in enumerate(_parameters(optimizer))}
    return {numbers.get(id(key), key): value for key, value in getattr(optimizer, "state", {}).items()}


def _replace(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    """Not by ``load_state_dict()``, which makes new parameter groups: the user may hold the old ones."""
    if not state and not getattr(optimizer, "state", None):
        return
    params = _parameters(optimizer)
    optimizer.state.clear()
    for key, value in state.items():
        optimizer.state[params[key] if isinstance(key, int) else key] = value


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` as JSON; its tensors are appended to ``tensors`` and stand in it as numbers.

    Raises:
        UserError: something in it is neither.
    """
    match value:
        case torch.Tensor():
            tensors.append(value)
            about = {"shape": list(value.shape), "dtype": str(value.dtype)[6:], "on_host": value.is_cpu}
            return {"tensor": len(tensors) - 1, **about}
        case None | bool() | int() | float() | str():
            return {"value": value}
        case dict():
            return {"dict": [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
        case list() | tuple():
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [encode(item, tensors) for item in value]}
        case _:
            raise UserError(
                f"the optimizer's state holds a {type(value).__name__}, which cannot be given to the other ranks: "
                f"call session.distribute() before the optimizer's first step"
            )


def decode(code: Any, tensors: list[torch.Tensor], where: torch.device) -> Any:
    """Inverse of :func:`encode`; tensors are made anew, with any values, and appended to ``tensors``. They are on the
    host (step counts) or on the device ``where``."""
    match code:
        case {"tensor": _, "shape": shape, "dtype": dtype, "on_host": on_host}:
            place = torch.device("cpu") if on_host else where
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=place))
            return tensors[-1]
        case {"value": value}:
            return value
        case {"dict": items}:
            return {decode(key, tensors, where): decode(item, tensors, where) for key, item in items}
        case {"tuple": items}:
            return tuple(decode(item, tensors, where) for item in items)
        case _:
            return [decode(item, tensors, where) for item in code["list"]]
