"""Multi-layer perceptrons."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from poseidon.errors import UserError
from poseidon.models.sized import Sized
from poseidon.models.sizes import check_positive, is_positive


def mlp(shape: Sequence[int], num_classes: int, widths: Sequence[int] = (512, 256)) -> nn.Module:
    """Linear layers with ReLU between them; [] is plain logistic regression.

    Args:
        shape: of one row of the input, flattened.
        widths: outputs of each hidden layer.

    Raises:
        UserError: a width or a side is none.
    """
    for name, numbers in (("widths", widths), ("dataset.shape", shape)):
        if not all(is_positive(number) for number in numbers):
            raise UserError(f"mlp: {name} must be positive whole numbers, are {list(numbers)}")
    check_positive(num_classes=num_classes)
    sizes = [math.prod(shape), *widths]
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU()
    layers["head"] = nn.Linear(sizes[-1], num_classes)
    return Sized("mlp", shape, layers)
