"""An optimizer's settings of one iteration (learning rate ...), put in place while its gradients are applied."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch


class Settings:
    """What stands in the parameter groups now, and which parameters: those of groups added later get no older gradient.

    Args:
        own: (group, key) of what the optimizer itself is seen to change in a step (counters of optimizers that keep
            them there): that is state, which nobody sets. Shared by all of an optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own: set[tuple[int, str]]) -> None:
        self._groups, self._own = optimizer.param_groups, own
        self._values = [_copy(group) for group in self._groups]
        self._params = [list(group["params"]) for group in self._groups]
        self._outside: list[dict[str, Any]] = []
        self._all: list[list[torch.Tensor]] = []  # parameters, as the groups have them outside of the step

    def enter(self, only: Container[int] | None = None) -> None:
        """A step is about to be made with them.

        Args:
            only: ids of the parameters that are to be stepped; None: all.
        """
        self._outside, self._all = [], [group["params"] for group in self._groups]
        for number, group in enumerate(self._groups):
            params = self._params[number] if number < len(self._params) else []
            group["params"] = params if only is None else [p for p in params if id(p) in only]
        for number, (group, values) in enumerate(zip(self._groups, self._values, strict=False)):
            mine = {key: value for key, value in values.items() if (number, key) not in self._own}
            self._outside.append({key: value for key, value in group.items() if key != "params"})
            group.update(_copy(mine))

    def leave(self) -> None:
        """It is made: what stood there before stands there again."""
        for group, params in zip(self._groups, self._all, strict=False):
            group["params"] = params
        for number, (group, outside) in enumerate(zip(self._groups, self._outside, strict=False)):
            self._own |= {(number, key) for key in group.keys() - outside.keys() - {"params"}}
            for key, value in outside.items():
                if key not in self._values[number] or (number, key) in self._own:
                    continue
                if _same(group.get(key), self._values[number][key]):
                    group[key] = value
                else:
                    self._own.add((number, key))


def _copy(group: dict[str, Any]) -> dict[str, Any]:
    """Rates may be tensors, which schedules write to."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one is other or one == other)
