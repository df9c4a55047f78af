"""One iteration of a model, cut up by the layers that have trained parameters, and metered: FLOPs, or seconds.

PyTorch numbers the nodes of its graph as the forward pass makes them, so that the numbers at the borders of each
module's call tell where a node was made: which parameters a call uses, and whose part of the backward pass a node is.
Names of modules, with which FlopCounterMode splits its own count, take several calls of a layer as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

Marks = list[tuple[Any, Any]]


class Meter(Protocol):
    """Reads something that only grows."""

    def mark(self) -> Any:
        """A reading."""

    def between(self, start: Any, end: Any) -> float:
        """What came to it from one reading to another; asked when the iteration is over."""


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        shape: of its first tensor argument.
    """

    path: str
    module: nn.Module
    shape: torch.Size | None


@dataclass(eq=False)
class Segment:
    """A stretch of the forward pass within one call, outside the calls that it makes.

    Attributes:
        call: None: outside the model.
        start: number of the first node that is made in it, if any is.
        params: names of the trained parameters that are used in it.
    """

    call: Call | None
    start: int
    forward: Marks = field(default_factory=list)
    backward: Marks = field(default_factory=list)
    params: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Layer:
    """A call that uses trained parameters: its segments, and those that follow it up to the next such call."""

    call: Call | None
    segments: list[Segment]
    meter: Meter

    @property
    def path(self) -> str:
        """Of the module; "" is the model itself."""
        return self.call.path if self.call else ""

    def forward(self) -> float:
        return self._sum(mark for segment in self.segments for mark in segment.forward)

    def backward(self) -> float:
        return self._sum(mark for segment in self.segments for mark in segment.backward)

    def _sum(self, marks: Iterator[tuple[Any, Any]]) -> float:
        return sum(self.meter.between(start, end) for start, end in marks)


def iterate(model: nn.Module, forward: Callable[[], Sequence[torch.Tensor]], meter: Meter) -> list[Layer]:
    """Runs one iteration's forward and backward pass; the layers in the order of their calls.

    Parameters, gradients and hooks are left as they were.

    Args:
        forward: calls the model once; gives what is to be differentiated.
    """
    names: dict[int, str] = {}
    for name, p in model.named_parameters():  # a shared one by its first name only
        if p.requires_grad:
            names[id(p)] = name
    with _gradients_kept(model), torch.enable_grad():
        recorder = _Recorder(meter)
        with recorder.hooked(model):
            outputs = [t for t in forward() if t.requires_grad]
        recorder.cut()
        _backward(recorder.segments, outputs, names, meter)
        received = {id(p) for p in model.parameters() if p.grad is not None}
    _place_the_rest(recorder.segments, model, {key: name for key, name in names.items() if key in received})
    return _layers(recorder.segments, meter)


class _Recorder:
    """Cuts the forward pass into segments."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._stack: list[Call] = []
        self.segments = [Segment(None, _next_node())]
        self._began = meter.mark()

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cut(self) -> None:
        """The segment ends here; another one begins in the innermost call."""
        self.segments[-1].forward.append((self._began, self._meter.mark()))
        self.segments.append(Segment(self._stack[-1] if self._stack else None, _next_node()))
        self._began = self._meter.mark()

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        self._stack.append(Call(path, module, None if first is None else first.shape))
        self.cut()

    def _leave(self, *_: Any) -> None:
        self._stack.pop()
        self.cut()


def _backward(
    segments: Sequence[Segment], outputs: Sequence[torch.Tensor], names: dict[int, str], meter: Meter
) -> None:
    """Runs it, and adds to each segment the parameters that its nodes use and what their gradients take."""
    starts = [segment.start for segment in segments]
    begun: dict[Any, Any] = {}

    def before(node: Any, _: Any) -> None:
        begun[node] = meter.mark()

    def after(node: Any, segment: Segment, *_: Any) -> None:
        segment.backward.append((begun.pop(node), meter.mark()))

    for node in _nodes(outputs):
        segment = segments[bisect_right(starts, node._sequence_nr()) - 1]
        node.register_prehook(partial(before, node))
        node.register_hook(partial(after, node, segment))
        for leaf, _ in node.next_functions:
            name = names.get(id(getattr(leaf, "variable", None)))
            if name is not None:
                segment.params.add(name)
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _nodes(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """Of the graph behind the outputs, without the leaves."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found[node] = None
            waiting += [behind for behind, _ in node.next_functions]
    return list(found)


def _place_the_rest(segments: Sequence[Segment], model: nn.Module, names: dict[int, str]) -> None:
    """Parameters with a gradient that no node of the graph holds (re-entrant checkpoints run their part of the
    forward pass without one): to the first call of their module, or of one around it."""
    found = {name for segment in segments for name in segment.params}
    called: dict[str, Segment] = {}
    for segment in segments:
        if segment.call is not None:
            called.setdefault(segment.call.path, segment)
    for key, name in names.items():
        if name in found:
            continue
        path = next(p for p, m in model.named_modules() if any(id(q) == key for q in m._parameters.values()))
        while path and path not in called:
            path = path.rpartition(".")[0]
        called.get(path, segments[0]).params.add(name)


def _layers(segments: Sequence[Segment], meter: Meter) -> list[Layer]:
    layers: list[Layer] = []
    waiting: list[Segment] = []
    for segment in segments:
        if segment.params and (not layers or layers[-1].call is not segment.call):
            layers.append(Layer(segment.call, [*waiting, segment], meter))
            waiting = []
        elif layers:
            layers[-1].segments.append(segment)
        else:
            waiting.append(segment)  # before the first layer: a part of it
    return layers


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    kept = [(p, p.grad) for p in model.parameters()]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in kept:
            p.grad = grad


def _next_node() -> int:
    """Number of the next node of the graph, in this thread."""
    return int(torch._C._autograd._get_sequence_nr())
