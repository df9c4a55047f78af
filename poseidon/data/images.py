"""Images kept as bytes and made numbers when they are fetched: a quarter of the memory of float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import Dataset

from poseidon.data.tensors import Rows

#: uint8 images (rows, channels, height, width) to as many of the same shape.
Change = Callable[[Tensor], Tensor]


class Images(Dataset[tuple[Tensor, ...]]):
    """Rows of (image, class): float32 (channels, height, width) and an int64 scalar, fetched a batch at a time.

    Args:
        labels: (rows,) classes of int64.
        mean, std: of a pixel in [0, 1], one number per channel; images come out as (pixel - mean) / std.
    """

    def __init__(self, labels: Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
        self.labels = labels
        self._shift = 255 * torch.tensor(mean).view(-1, 1, 1)
        self._scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))

    def pixels(self, indices: Sequence[int]) -> Tensor:
        """uint8 (rows, channels, height, width) of at least one row."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        if not indices:
            return Rows(torch.empty(0), self.labels[:0])
        images = self.pixels(indices).float().sub_(self._shift).mul_(self._scale)
        return Rows(images, self.labels[torch.tensor(indices, dtype=torch.int64)])


class Stored(Images):
    """Images that lie in memory.

    Args:
        images: uint8 (rows, channels, height, width).
        change: what is done to each batch fetched, such as :func:`shift_and_flip`.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float], change: Change | None = None
    ) -> None:
        super().__init__(labels, mean, std)
        self.images = images
        self.change = change

    def pixels(self, indices: Sequence[int]) -> Tensor:
        chosen = self.images.index_select(0, torch.tensor(indices, dtype=torch.int64))
        return self.change(chosen) if self.change is not None else chosen


def shift_and_flip(padding: int) -> Change:
    """Each image is cut at a random place out of itself with a black edge of ``padding`` pixels, and every other
    one mirrored, in one operation for the whole batch.

    Draws from PyTorch's own generator, which a training seeds by rank and epoch.
    """
    return partial(_shift_and_flip, padding=padding)


def _shift_and_flip(images: Tensor, padding: int) -> Tensor:
    rows, channels, height, width = images.shape
    top = torch.randint(2 * padding + 1, (rows, 1))
    left = torch.randint(2 * padding + 1, (rows, 1))
    mirrored = torch.randint(2, (rows, 1), dtype=torch.bool)
    across = torch.arange(width)
    y = top + torch.arange(height)
    x = left + torch.where(mirrored, across.flip(0), across)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    row = torch.arange(rows).view(-1, 1, 1, 1)
    channel = torch.arange(channels).view(1, -1, 1, 1)
    return padded[row, channel, y.view(rows, 1, height, 1), x.view(rows, 1, 1, width)]
