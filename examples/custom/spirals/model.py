"""A perceptron with residual connections."""

from torch import Tensor, nn


class ResidualMLP(nn.Module):
    def __init__(self, inputs: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        x = self.stem(points)
        for block in self.blocks:
            x = x + block(x.relu())
        return self.head(x.relu())
