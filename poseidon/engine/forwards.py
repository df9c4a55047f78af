"""Forward passes of the root module, and the rows that a step's gradient is a mean over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def leading_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The first dimension of the first tensor argument (the length, if it is a list); 0 without one."""
    first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor | list)), None)
    if isinstance(first, torch.Tensor):
        return first.shape[0] if first.dim() else 1
    return 0 if first is None else len(first)


class Forward:
    """One forward pass with grad enabled.

    Attributes:
        rows: of its input.
        hooked: it has outputs whose gradient can be watched.
        reached: autograd's id of the backward pass that came through its outputs.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.hooked = False
        self.reached: int | None = None
        self._reach: weakref.ref[Reach] | None = None

    @classmethod
    def begin(cls, rows: int, then: Callable[[], None]) -> tuple[Forward, Reach]:
        """A forward pass, and the hook for its outputs, which calls `then`."""
        forward = cls(rows)
        reach = Reach(forward, then)
        forward._reach = weakref.ref(reach)
        return forward, reach

    def alive(self) -> bool:
        """Is, or may yet be, a part of the gradient: not if its graph was dropped before any backward pass
        came through, as that of an evaluation without ``torch.no_grad()``. The graph owns the hook."""
        return self.reached is not None or not self.hooked or (self._reach is not None and self._reach() is not None)


class Reach:
    """Hook of an output's gradient."""

    def __init__(self, forward: Forward, then: Callable[[], None]) -> None:
        self._forward, self._then = forward, then

    def __call__(self, grad: torch.Tensor) -> None:
        self._forward.reached = torch._C._current_graph_task_id()
        self._then()
