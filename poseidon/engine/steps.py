"""Noticing optimizer steps: those of every optimizer that holds a model's parameters, whoever made it and when."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

log = logging.getLogger("poseidon")

Call = Callable[[torch.optim.Optimizer, Any, Any], torch.optim.Optimizer | None]

_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


class _Watch:
    """torch's hook on all optimizers' steps, there as long as somebody watches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: tuple[Call, ...] = ()
        self._handle: RemovableHandle | None = None

    def add(self, call: Call) -> Callable[[], None]:
        """Let `call` run before every step of any optimizer; what is returned undoes it. An optimizer
        that `call` returns is what the step goes on with."""
        with self._lock:
            self._calls += (call,)
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_step)
        return lambda: self._remove(call)

    def _remove(self, call: Call) -> None:
        with self._lock:
            self._calls = tuple(other for other in self._calls if other is not call)
            if not self._calls and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        chosen = [call(optimizer, args, kwargs) for call in self._calls]
        other = next((each for each in chosen if each is not None), None)
        return None if other is None else ((other, *args[1:]), kwargs)


watch = _Watch().add


def holds(optimizer: torch.optim.Optimizer, params: Container[int]) -> bool:
    """Does it step one of these parameters, given by id?"""
    return any(id(p) in params for group in optimizer.param_groups for p in group["params"])


def within(concerned: Callable[[torch.optim.Optimizer], bool]) -> bool:
    """Is the step that begins a part of another one of a `concerned` optimizer: of a subclass that calls
    ``super().step()``, of one that wraps it? Read off the Python stack."""
    if torch.compiler.is_compiling():  # a compiled step has one frame
        return False
    frame = sys._getframe(1)
    begins = True
    while frame is not None:
        if frame.f_code is _STEP:
            if not begins and concerned(frame.f_locals["self"]):
                return True
            begins = False
        frame = frame.f_back  # type: ignore[assignment]
    return False


def warn_of_strangers(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Says what it trains beside these models."""
    owned = {id(p) for model in models for p in model.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    shapes = [str(list(p.shape)) for p in params if id(p) not in owned]
    if shapes:
        log.warning(
            "%s also steps parameters of no distributed model (%d, of shape %s%s): their gradients are each rank's "
            "own, so that they drift apart; make them parameters of the model before distribute()",
            type(optimizer).__name__,
            len(shapes),
            ", ".join(shapes[:3]),
            " ..." if shapes[3:] else "",
        )
