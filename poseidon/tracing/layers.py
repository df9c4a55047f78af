"""When a real model's layers compute: hooks that are there for the chosen iterations only.

Moments are the host's: on CUDA those at which kernels were issued, as nothing waits for the device. A layer's backward
pass lasts from the gradient of its output to that of its input, or of its own parameters if that comes later. Gradients
of outputs are watched by hooks on tensors; a module's backward hooks would put views into the graph, which in-place
activations refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from poseidon.tracing.tracer import About, Row, Tracer


class _Call:
    """One call of a layer."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.begun = time.monotonic()  # forward
        self.start: float | None = None  # backward
        self.end: float | None = None


class LayerHooks:
    """Of one model: every module that has no others in it, or parameters of its own.

    Args:
        parameters: may they be hooked, too? Without, the backward pass of layers on the model's inputs is not seen.
    """

    def __init__(self, model: nn.Module, tracer: Tracer, *, parameters: bool = True) -> None:
        self._model, self._tracer, self._parameters = model, tracer, parameters
        self._undo: list[Callable[[], None]] = []
        self._open: dict[str, list[_Call]] = {}  # forward passes that run
        self._calls: list[_Call] = []
        self._newest: dict[str, _Call] = {}  # that the backward pass has reached

    def install(self) -> None:
        for path, module in self._model.named_modules():
            own = list(module.parameters(recurse=False))
            if not own and next(module.children(), None) is not None:
                continue
            self._undo.append(module.register_forward_pre_hook(partial(self._before, path)).remove)
            self._undo.append(module.register_forward_hook(partial(self._after, path)).remove)
            for p in own if self._parameters else ():
                if p.requires_grad:
                    self._undo.append(p.register_post_accumulate_grad_hook(partial(self._accumulated, path)).remove)

    def remove(self) -> None:
        """Take them off, and tell of the backward passes."""
        while self._undo:
            self._undo.pop()()
        for call in self._calls:
            if call.start is not None and call.end is not None:
                self._span("backward", call.layer, call.start, call.end)
        self._open, self._calls, self._newest = {}, [], {}

    def _span(self, what: str, layer: str, start: float, end: float) -> None:
        self._tracer.span(Row.device, About(f"{what} {layer}", layer, {"pass": what}), start, end)

    def _before(self, path: str, module: nn.Module, args: Any) -> None:
        call = _Call(path)
        self._open.setdefault(path, []).append(call)
        for tensor in _differentiable(args):
            tensor.register_hook(partial(self._left, call))

    def _after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open.get(path):  # a call before it raised
            return
        call = self._open[path].pop()
        self._span("forward", path, call.begun, time.monotonic())
        self._calls.append(call)
        for tensor in _differentiable(output):
            tensor.register_hook(partial(self._reached, call))

    def _reached(self, call: _Call, grad: torch.Tensor) -> None:
        self._newest[call.layer] = call
        if call.start is None:
            call.start = time.monotonic()

    def _left(self, call: _Call, grad: torch.Tensor) -> None:
        call.end = self._tracer.computed = time.monotonic()

    def _accumulated(self, path: str, p: torch.Tensor) -> None:
        if path in self._newest:
            self._newest[path].end = self._tracer.computed = time.monotonic()


def _differentiable(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _differentiable(each)
    elif isinstance(value, dict):
        yield from _differentiable(list(value.values()))
