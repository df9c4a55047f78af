"""Multi-layer perceptrons."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from poseidon.errors import UserError
from poseidon.models.sized import Sized


def mlp(shape: Sequence[int], num_classes: int, widths: Sequence[int] = (512, 256)) -> nn.Module:
    """Linear layers with ReLU between them; [] is plain logistic regression.

    Args:
        shape: of one row of the input, flattened.
        widths: outputs of each hidden layer.

    Raises:
        UserError: a width is none.
    """
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise UserError(f"mlp: widths must be positive whole numbers, are {list(widths)}")
    sizes = [math.prod(shape), *widths]
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU()
    layers["head"] = nn.Linear(sizes[-1], num_classes)
    return Sized("mlp", shape, layers)
