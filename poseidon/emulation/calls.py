"""The calls of a model's layers in one iteration, and their FLOPs, from a trial without memory or arithmetic.

One forward and one backward pass on the meta device. PyTorch numbers the nodes of its graph as the forward pass makes
them, so that the numbers at the borders of each module's call tell where a node was made: which parameters a call
uses, and whose FLOPs a node of the backward pass are. Names of modules and hooks on their gradients, with which
FlopCounterMode splits its own count, take several calls of a layer as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from poseidon.engine.capture import can_capture
from poseidon.engine.embedding import can_record_rows
from poseidon.engine.parameters import tensors_in


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer in a forward pass, with all that follows it up to the next layer that has parameters.

    Attributes:
        layer: path of the module, as in ``named_modules()``; "" is the model itself.
        kind: name of the module's class.
        params: names of the trained parameters that this call uses, as in ``named_parameters()``: the module's own, and
            those of inner modules whose weights it takes without calling them (nn.MultiheadAttention). One that
            several calls share is in each of them. Without any, a call is a part of the one before it.
        rows: K, if the module is a plain ``nn.Linear``.
        indices: looked up, if the module is a plain ``nn.Embedding``.
        forward_flops, backward_flops: a multiplication and an addition are two; of what has no formula in PyTorch's
            counter (pooling, activations, normalisation) 0.
        batchnorm: it normalises over the batch.
    """

    layer: str
    kind: str
    params: tuple[str, ...]
    rows: int | None
    indices: int | None
    forward_flops: float
    backward_flops: float
    batchnorm: bool = False


def trace(model: nn.Module, *inputs: Any) -> list[LayerCall]:
    """The calls of layers that have trained parameters, in the order of the forward pass.

    The first layer's backward pass has no gradient of its input, if that asks for none. Parameters, gradients and hooks
    are left as they were, and so are buffers on the meta device, which has no values.

    Args:
        model: in training mode; on the meta device this takes neither memory nor arithmetic.
        inputs: its arguments, on the same device.
    """
    names: dict[int, str] = {}
    for name, p in model.named_parameters():  # a shared one by its first name only
        if p.requires_grad:
            names[id(p)] = name
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward}
    )
    with _gradients_kept(model), counter, torch.enable_grad():
        recorder = _Recorder(counter)
        with recorder.hooked(model):
            outputs = [t for t in tensors_in(model(*inputs)) if t.requires_grad]
        recorder.cut()
        _backward(recorder, outputs, names)
        received = {id(p) for p in model.parameters() if p.grad is not None}
    recorder.place_the_rest(model, {key: name for key, name in names.items() if key in received})
    return _joined(recorder.segments, {name: index for index, name in enumerate(names.values())})


@dataclass(eq=False)
class _Call:
    path: str
    module: nn.Module
    rows: int | None = None
    indices: int | None = None


@dataclass(eq=False)
class _Segment:
    """A stretch of the forward pass within one call, outside the calls that it makes.

    Attributes:
        start: number of the first node that is made in it, if any is.
    """

    call: _Call | None
    start: int
    forward: float = 0.0
    backward: float = 0.0
    params: dict[str, None] = field(default_factory=dict)


class _Recorder:
    """Cuts the forward pass into segments."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter = counter
        self.segments = [_Segment(None, _next_node())]
        self.calls: list[_Call] = []
        self._stack: list[_Call] = []
        self._counted = 0.0

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
        total = self.counter.get_total_flops()
        self.segments[-1].forward += total - self._counted
        self._counted = total
        self.segments.append(_Segment(self._stack[-1] if self._stack else None, _next_node()))

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = _Call(path, module)
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        if first is not None and can_capture(module):
            call.rows = first.numel() // first.shape[-1]
        elif first is not None and can_record_rows(module):
            call.indices = first.numel()
        self._stack.append(call)
        self.calls.append(call)
        self.cut()

    def _leave(self, *_: Any) -> None:
        self._stack.pop()
        self.cut()

    def place_the_rest(self, model: nn.Module, names: dict[int, str]) -> None:
        """Parameters with a gradient that no node of the graph holds (re-entrant checkpoints run their part of the
        forward pass without one): to the first call of their module, or of one around it."""
        found = {name for segment in self.segments for name in segment.params}
        called: dict[str, _Segment] = {}
        for segment in self.segments:
            if segment.call is not None:
                called.setdefault(segment.call.path, segment)
        for key, name in names.items():
            if name in found:
                continue
            path = next(p for p, m in model.named_modules() if any(id(q) == key for q in m._parameters.values()))
            while path and path not in called:
                path = path.rpartition(".")[0]
            called.get(path, self.segments[0]).params[name] = None


def _backward(recorder: _Recorder, outputs: Sequence[torch.Tensor], names: dict[int, str]) -> None:
    """Runs it, and adds to each segment the parameters that its nodes use and the FLOPs of their gradients."""
    starts = [segment.start for segment in recorder.segments]
    total = recorder.counter.get_total_flops
    begun: dict[Any, float] = {}

    def before(node: Any, _: Any) -> None:
        begun[node] = total()

    def after(node: Any, segment: _Segment, *_: Any) -> None:
        segment.backward += total() - begun.pop(node)

    for node in _nodes(outputs):
        segment = recorder.segments[bisect_right(starts, node._sequence_nr()) - 1]
        node.register_prehook(partial(before, node))
        node.register_hook(partial(after, node, segment))
        for leaf, _ in node.next_functions:
            name = names.get(id(getattr(leaf, "variable", None)))
            if name is not None:
                segment.params[name] = None
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


def _joined(segments: Sequence[_Segment], order: dict[str, int]) -> list[LayerCall]:
    """One call of a layer per stretch between two layers that use parameters.

    Args:
        order: of the parameters in the model.
    """
    groups: list[list[_Segment]] = []
    heads: list[_Call | None] = []
    waiting: list[_Segment] = []
    for segment in segments:
        if segment.params and (not heads or heads[-1] is not segment.call):
            groups.append([*waiting, segment])
            heads.append(segment.call)
            waiting = []
        elif groups:
            groups[-1].append(segment)
        else:
            waiting.append(segment)  # before the first layer: a part of it
    return [_layer_call(head, group, order) for head, group in zip(heads, groups, strict=True)]


def _layer_call(head: _Call | None, group: Sequence[_Segment], order: dict[str, int]) -> LayerCall:
    modules = [segment.call.module for segment in group if segment.call is not None]
    return LayerCall(
        layer=head.path if head else "",
        kind=type(head.module).__name__ if head else "",
        params=tuple(sorted({name for segment in group for name in segment.params}, key=order.__getitem__)),
        rows=head.rows if head else None,
        indices=head.indices if head else None,
        forward_flops=sum(segment.forward for segment in group),
        backward_flops=sum(segment.backward for segment in group),
        batchnorm=any(isinstance(module, _BatchNorm) for module in modules),
    )


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


def _convolution_backward(
    grad: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Sequence[bool],
    **_: Any,
) -> int:
    """FLOPs of gradients of (input, weight, bias) that `mask` asks for; shapes. PyTorch's own formula counts that of a
    weight in groups as if each saw all channels."""
    product = 2 * prod(weight) * prod((x[0], *(x if transposed else grad)[2:]))
    return product * (mask[0] + mask[1])


def _next_node() -> int:
    """Number of the next node of the graph, in this thread."""
    return int(torch._C._autograd._get_sequence_nr())
