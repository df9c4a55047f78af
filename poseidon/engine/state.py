"""An optimizer's state as plain JSON and tensors: what crosses the network without a pickle."""

from __future__ import annotations

from typing import Any

import torch

from poseidon.errors import UserError


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` as JSON; its tensors are appended to ``tensors`` and stand in it as numbers.

    Raises:
        UserError: something in it is neither.
    """
    match value:
        case torch.Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1, "shape": list(value.shape), "dtype": str(value.dtype)[6:]}
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


def decode(code: Any, tensors: list[torch.Tensor]) -> Any:
    """Inverse of :func:`encode`; tensors are made anew, with any values, and appended to ``tensors``."""
    match code:
        case {"tensor": _, "shape": shape, "dtype": dtype}:
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            return tensors[-1]
        case {"value": value}:
            return value
        case {"dict": items}:
            return {decode(key, tensors): decode(item, tensors) for key, item in items}
        case {"tuple": items}:
            return tuple(decode(item, tensors) for item in items)
        case _:
            return [decode(item, tensors) for item in code["list"]]
