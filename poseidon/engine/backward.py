"""Noticing final gradients: hooks on a user's model that survive copies, and what autograd is doing right now."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.function as autograd_function
import torch.autograd.graph as autograd_graph
from torch.nn.utils import stateless

from poseidon.transport import Owner

_RUN = autograd_graph._engine_run_backward.__code__
_APPLY = autograd_function.BackwardCFunction.apply.__code__
_FUNCTIONAL = stateless._functional_call.__code__


class Hook:
    """A hook that a copy, a pickle or a forked child's model has as a no-op: it must not drag the engine along.

    Args:
        copied: called with the memo of a deep copy, or None, when what it hangs on is copied or pickled.
    """

    __slots__ = ("_owner", "call", "copied")

    def __init__(
        self, call: Callable[..., Any] | None = None, copied: Callable[[dict[int, Any] | None], None] | None = None
    ) -> None:
        self.call, self.copied = call, copied
        self._owner = Owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.call is None or not self._owner.here() else self.call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return self._plain(None), ()

    def __deepcopy__(self, memo: Any) -> Hook:
        return self._plain(memo)()

    def _plain(self, memo: dict[int, Any] | None) -> type[Hook]:
        if self.copied is not None and self._owner.here():
            self.copied(memo)
        return Hook


def nested() -> bool:
    """Does this backward pass run inside another one (reentrant checkpoint, backward() in a Function or hook)?

    Read off the Python stack: two runs of the engine, or one under a Function's backward.
    """
    frame = sys._getframe(1)
    seen = False
    while frame is not None:
        code = frame.f_code
        if code is _RUN:
            if seen:
                return True
            seen = True
        elif seen and code is _APPLY:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def borrowed() -> bool:
    """Does this forward pass have other tensors in its parameters' places: ``torch.func.functional_call``, export?"""
    if torch._C._len_torch_dispatch_stack():  # tracing on fake tensors
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
