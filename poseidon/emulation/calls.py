"""The calls of a model's layers in one iteration, and their FLOPs: a trial on the meta device, which has shapes but
neither memory nor arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from poseidon.emulation.segments import Layer, iterate
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
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        layers = iterate(model, lambda: tensors_in(model(*inputs)), _Flops(counter))
    return [_layer_call(layer, order) for layer in layers]


class _Flops:
    def __init__(self, counter: FlopCounterMode) -> None:
        self.mark = counter.get_total_flops

    def between(self, start: int, end: int) -> float:
        return end - start


def _layer_call(layer: Layer, order: dict[str, int]) -> LayerCall:
    modules = [segment.call.module for segment in layer.segments if segment.call is not None]
    rows = indices = None
    if layer.call is not None and layer.call.shape is not None:
        shape = layer.call.shape
        rows = prod(shape[:-1]) if can_capture(layer.call.module) else None
        indices = prod(shape) if can_record_rows(layer.call.module) else None
    return LayerCall(
        layer=layer.path,
        kind=type(layer.call.module).__name__ if layer.call else "",
        params=tuple(sorted({name for segment in layer.segments for name in segment.params}, key=order.__getitem__)),
        rows=rows,
        indices=indices,
        forward_flops=layer.forward(),
        backward_flops=layer.backward(),
        batchnorm=any(isinstance(module, _BatchNorm) for module in modules),
    )


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
