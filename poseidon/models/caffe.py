"""The papers' networks as Caffe has them: layer names, sizes and rounding of the pooling windows.

Weights start as PyTorch's defaults, not as Caffe's fillers: those need the released solvers' long warm-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from poseidon.errors import UserError
from poseidon.models.sized import Sized
from poseidon.models.sizes import check_positive, features, is_positive


def lenet(shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> nn.Module:
    """Two convolutions, two linear layers; 431,080 parameters by default.

    Args:
        shape: channels, height and width of an image, at least 15x15.

    Raises:
        UserError: the images are too small.
    """
    inputs = _inputs("lenet", shape, num_classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(shape[0], 20, 5),
        pool1=nn.MaxPool2d(2, 2, ceil_mode=True),
        conv2=nn.Conv2d(20, 50, 5),
        pool2=nn.MaxPool2d(2, 2, ceil_mode=True),
        flat=nn.Flatten(),
        ip1=nn.Linear(inputs, 500),
        relu1=nn.ReLU(),
        ip2=nn.Linear(500, num_classes),
    )
    return Sized("lenet", shape, layers)


def cifar10_quick(shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> nn.Module:
    """Three convolutions, two linear layers; 145,578 parameters by default. Arguments as of :func:`lenet`."""
    inputs = _inputs("cifar10_quick", shape, num_classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(shape[0], 32, 5, padding=2),
        pool1=nn.MaxPool2d(3, 2, ceil_mode=True),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 32, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.AvgPool2d(3, 2, ceil_mode=True),
        conv3=nn.Conv2d(32, 64, 5, padding=2),
        relu3=nn.ReLU(),
        pool3=nn.AvgPool2d(3, 2, ceil_mode=True),
        flat=nn.Flatten(),
        ip1=nn.Linear(inputs, 64),
        ip2=nn.Linear(64, num_classes),
    )
    return Sized("cifar10_quick", shape, layers)


def alexnet(
    shape: Sequence[int] = (3, 227, 227),
    num_classes: int = 1000,
    dropout: float = 0.5,
    widths: Sequence[int] = (4096, 4096),
) -> nn.Module:
    """Caffe's AlexNet, with the two groups of the original; 60,965,224 parameters by default.

    Args:
        shape: channels, height and width of an image; 224x224 gives the same number of parameters.
        dropout: probability after each of the two large linear layers.
        widths: outputs of these two, fc6 and fc7; 3000 each in P15's network for ImageNet-22K.

    Raises:
        UserError: the images are too small, or there are not two widths.
    """
    inputs = _inputs("alexnet", shape, num_classes)
    if len(widths) != 2 or not all(is_positive(width) for width in widths):
        raise UserError(f"alexnet: widths must be positive whole numbers, two for fc6 and fc7, are {list(widths)}")

    def norm() -> nn.Module:
        return nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(shape[0], 96, 11, stride=4),
        relu1=nn.ReLU(),
        norm1=norm(),
        pool1=pool(),
        conv2=nn.Conv2d(96, 256, 5, padding=2, groups=2),
        relu2=nn.ReLU(),
        norm2=norm(),
        pool2=pool(),
        conv3=nn.Conv2d(256, 384, 3, padding=1),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(384, 384, 3, padding=1, groups=2),
        relu4=nn.ReLU(),
        conv5=nn.Conv2d(384, 256, 3, padding=1, groups=2),
        relu5=nn.ReLU(),
        pool5=pool(),
        flat=nn.Flatten(),
        fc6=nn.Linear(inputs, widths[0]),
        relu6=nn.ReLU(),
        drop6=nn.Dropout(dropout),
        fc7=nn.Linear(widths[0], widths[1]),
        relu7=nn.ReLU(),
        drop7=nn.Dropout(dropout),
        fc8=nn.Linear(widths[1], num_classes),
    )
    return Sized("alexnet", shape, layers)


def _inputs(network: str, shape: Sequence[int], num_classes: int) -> int:
    """Inputs of the first linear layer; before any layer is made, which would complain in PyTorch's words."""
    check_positive(num_classes=num_classes)
    return features(network, shape)
