"""Points on noisy spirals, drawn from a seed."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset):
    """``size`` points (2,) of float32 in about [-1, 1], with the number of their arm."""

    def __init__(self, size: int, arms: int, noise: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.arm = torch.randint(arms, (size,), generator=generator)
        radius = torch.rand(size, generator=generator).sqrt()
        angle = 2 * math.pi * (radius + self.arm / arms)
        self.points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        self.points += noise * torch.randn(size, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.arm)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.arm[index]


def spirals(arms: int, train_size: int = 2000, eval_size: int = 500, noise: float = 0.02, seed: int = 0):
    """What ``dataset._target_`` must give: the data set to train on and the one to evaluate on."""
    return Spirals(train_size, arms, noise, 2 * seed), Spirals(eval_size, arms, noise, 2 * seed + 1)
