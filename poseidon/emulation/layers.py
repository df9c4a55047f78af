"""What a model's layers take on emulated hardware: calls of layers, their FLOPs, and their share of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poseidon.config.hardware import HardwareConfig


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer in a forward pass, and what follows it up to the next layer that has parameters.

    Attributes:
        layer: path of the module, as in ``named_modules()``; "" is the model itself.
        kind: name of the module's class.
        params: names of the trained parameters that this call uses, as in ``named_parameters()``; one that several
            calls share is in each of them.
        rows: K, if the module is a plain ``nn.Linear``.
        indices: looked up, if the module is a plain ``nn.Embedding``.
        forward_flops, backward_flops: with a multiplication and an addition as two.
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


@dataclass(frozen=True)
class LayerTime(LayerCall):
    """A call with its times.

    Attributes:
        forward, backward: seconds, undilated.
    """

    forward: float = 0.0
    backward: float = 0.0


def trace(model: nn.Module, *inputs: Any) -> list[LayerCall]:
    """The calls of layers that have trained parameters, in the order of the forward pass.

    Args:
        model: in training mode; on the meta device this takes neither memory nor arithmetic.
    """
    raise NotImplementedError


def layer_times(
    calls: Sequence[LayerCall],
    profile: HardwareConfig,
    model_name: str,
    batch_size: int,
    *,
    step_bytes: float = 0.0,
) -> tuple[list[LayerTime], float]:
    """Seconds of each call, and of the optimizer step; together the profile's iteration.

    Args:
        step_bytes: that the optimizer step reads and writes, see :func:`step_bytes`.

    Raises:
        UserError: the profile does not tell this model's time.
    """
    raise NotImplementedError


def step_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes that a step reads and writes: per parameter, w and its gradient read, w written, and each state of its
    size (a momentum) read and written; SGD with momentum: 20 bytes per parameter. Works on the meta device.
    """
    raise NotImplementedError
