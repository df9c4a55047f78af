"""A module's parameters, which say so when they are looked at."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Read = Callable[[Iterable[int]], None]
_ZERO = nn.Module.zero_grad.__code__


class Watched(dict[str, Any]):
    """In the place of ``module._parameters``: there ``module.weight``, ``parameters()``, ``state_dict()``, ``to()`` and
    copies all look. A copy is a plain dictionary.

    Args:
        read: called with the ids of what is being looked at, before.
    """

    def __init__(self, params: dict[str, Any], read: Read) -> None:
        super().__init__(params)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        self._read((id(found),))
        return found

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        self._read((id(found),))
        return found

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def _read_all(self) -> None:
        # nn.Module.zero_grad() looks at gradients only, through parameters(), two more generators and a lambda.
        frame: Any = sys._getframe(2)
        for _ in range(5):
            if frame is None:
                break
            if frame.f_code is _ZERO:
                return
            frame = frame.f_back
        self._read(tuple(map(id, super().values())))


def watch(module: nn.Module, read: Read) -> Callable[[], None] | None:
    """Returns what undoes it; None where the module has no parameters, or keeps them elsewhere (TorchScript)."""
    params = module.__dict__.get("_parameters")
    if not params or type(params) is not dict or isinstance(module, torch.jit.ScriptModule):
        return None
    watched = module.__dict__["_parameters"] = Watched(params, read)

    def undo() -> None:
        if module.__dict__["_parameters"] is watched:
            module.__dict__["_parameters"] = dict(dict.items(watched))

    return undo
