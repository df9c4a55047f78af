"""Which inputs each network takes, and how large its maps are, without torch: for building them, and for refusing
an input before anything is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.errors import UserError

Shape = Sequence[int]


class ShapeError(UserError):
    """A network does not take inputs of this shape."""


@dataclass(frozen=True)
class Window:
    """A convolution or pooling: square, in pixels. Caffe rounds up how often a pooling window fits (``ceil``)."""

    kernel: int
    stride: int = 1
    padding: int = 0
    ceil: bool = False

    def __call__(self, side: int) -> int:
        """Side of the output; 0 if the window does not fit."""
        span = side + 2 * self.padding - self.kernel
        if span < 0:
            return 0
        return (math.ceil if self.ceil else math.floor)(span / self.stride) + 1


_CONV5 = Window(5)
_CONV5_SAME = Window(5, padding=2)
_POOL2 = Window(2, 2, ceil=True)
_POOL3 = Window(3, 2, ceil=True)

#: Convolutions and poolings in their order, without those that keep the size; then channels of the last map.
LAYOUT: dict[str, tuple[tuple[Window, ...], int]] = {
    "lenet": ((_CONV5, _POOL2, _CONV5, _POOL2), 50),
    "cifar10_quick": ((_CONV5_SAME, _POOL3, _CONV5_SAME, _POOL3, _CONV5_SAME, _POOL3), 64),
    "alexnet": ((Window(11, 4), _POOL3, _POOL3, _POOL3), 256),
}


def features(network: str, shape: Shape) -> int:
    """Inputs of the first linear layer of ``network`` for images of ``shape`` (channels, height, width).

    Raises:
        ShapeError: not an image's shape, or too small for the network.
    """
    check_is_image(network, shape)
    windows, channels = LAYOUT[network]
    height, width = (_through(windows, side) for side in shape[1:])
    if not height * width:
        least = next(side for side in range(1, 1000) if _through(windows, side))
        raise ShapeError(
            f"{network} needs images of at least {least}x{least}; dataset.shape says {shape[1]}x{shape[2]}"
        )
    return channels * height * width


#: Side of the smallest image of torchvision's networks, with auxiliary heads and without.
LEAST: dict[str, tuple[int, int]] = {
    "googlenet": (15, 15),
    "inception_v3": (299, 75),
    "resnet50": (1, 1),
    "resnet152": (1, 1),
    "vgg19": (32, 32),
}


def check_images(arch: str, shape: Shape, aux: bool) -> None:
    """Raises ShapeError unless a network of :data:`LEAST` can be trained on images of ``shape``."""
    check_is_image(arch, shape)
    if shape[0] != 3:
        raise ShapeError(f"{arch} needs images of 3 channels, dataset.shape={list(shape)} has {shape[0]}")
    least = LEAST[arch][0 if aux else 1]
    if min(shape[1:]) < least:
        without = LEAST[arch][1]
        hint = f" (with model.aux=false {without}x{without})" if aux and without < least else ""
        raise ShapeError(
            f"{arch} needs images of at least {least}x{least}{hint}; dataset.shape says {shape[1]}x{shape[2]}"
        )


def check_is_image(network: str, shape: Shape) -> None:
    """Raises ShapeError unless ``shape`` is (channels, height, width)."""
    if len(shape) != 3 or not all(is_positive(side) for side in shape):
        raise ShapeError(f"{network} needs images: dataset.shape must be [channels, height, width], is {list(shape)}")


def check_transformer(shape: Shape, *, width: Any, heads: Any, layers: Any, mlp_ratio: Any, dropout: Any) -> None:
    """Raises UserError unless a language model of these sizes can be made; its vocabulary is not looked at."""
    if len(shape) != 1 or not is_positive(shape[0]):
        raise ShapeError(f"transformer_lm needs rows of token ids: dataset.shape must be [positions], is {list(shape)}")
    check_positive(width=width, heads=heads, layers=layers, mlp_ratio=mlp_ratio)
    if width % heads:
        raise UserError(f"heads={heads} must divide width={width}, which the heads share")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise UserError(f"dropout={dropout} must be at least 0 and less than 1")


def is_positive(value: Any) -> bool:
    """Whether it is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_positive(**values: Any) -> None:
    """Raises UserError, naming the argument, unless all are whole numbers from 1."""
    for name, value in values.items():
        if not is_positive(value):
            raise UserError(f"{name}={value} must be a positive whole number")


def _through(windows: Sequence[Window], side: int) -> int:
    for window in windows:
        side = window(side)
    return side
