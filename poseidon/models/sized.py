"""A plain stack of layers that says in one line when it is fed something else than it was built for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from poseidon.errors import UserError


class Sized(nn.Sequential):
    """Layers in their order, for inputs of (rows, *shape).

    Raises:
        UserError: in ``forward``, on inputs of another shape.
    """

    def __init__(self, network: str, shape: Sequence[int], layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__(layers)
        self.network = network
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.shape:
            raise UserError(
                f"{self.network} was built for inputs of {list(self.shape)} (dataset.shape), "
                f"the data set gives {list(x.shape[1:])}"
            )
        for layer in self:
            x = layer(x)
        return x
