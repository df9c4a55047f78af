"""Noise in any shape, for measuring speed: what is to be learnt has nothing to do with what is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from poseidon.data.check import check_noise
from poseidon.data.tensors import Rows

#: Images are windows of one buffer of noise, at one of so many places.
_PLACES = 1 << 16


class Noise(Dataset[tuple[Tensor, ...]]):
    """``size`` rows of (image of standard normal float32, class as an int64 scalar).

    A row costs a copy and no more, so that it is the training which is measured: image ``i`` is a window of a
    buffer of noise, made on first use in each process, at a place that depends on seed and ``i``.
    """

    def __init__(self, shape: Sequence[int], classes: int, size: int, seed: int) -> None:
        self.shape = tuple(shape)
        self.classes = classes
        self.size = size
        self.seed = seed
        self._buffer: Tensor | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        mixed = [_mix(self.seed, self._inside(index)) for index in indices]
        places = torch.tensor([number % _PLACES for number in mixed], dtype=torch.int64)
        classes = torch.tensor([(number >> 16) % self.classes for number in mixed], dtype=torch.int64)
        return Rows(self._windows().index_select(0, places).view(-1, *self.shape), classes)

    def _inside(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index

    def _windows(self) -> Tensor:
        """Every window of the buffer, (_PLACES + 1, numbers per image): a view."""
        if self._buffer is None:
            generator = torch.Generator().manual_seed(self.seed)
            self._buffer = torch.randn(math.prod(self.shape) + _PLACES, generator=generator)
        return self._buffer.unfold(0, math.prod(self.shape), 1)


class Babble(Noise):
    """``size`` rows of (random codes, the codes one place later), both int64 of (positions,) and below ``classes``."""

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        places = torch.tensor([_mix(self.seed, self._inside(index)) % _PLACES for index in indices], dtype=torch.int64)
        chosen = self._windows().index_select(0, places)
        return Rows(chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous())

    def _windows(self) -> Tensor:
        (positions,) = self.shape
        if self._buffer is None:
            generator = torch.Generator().manual_seed(self.seed)
            self._buffer = torch.randint(self.classes, (positions + 1 + _PLACES,), generator=generator)
        return self._buffer.unfold(0, positions + 1, 1)


def synthetic(
    image_shape: Sequence[int],
    classes: int,
    size: int = 2048,
    eval_size: int = 256,
    seed: int = 0,
    values: str = "float32",
) -> tuple[Noise, Noise]:
    """(train, evaluation) of ``size`` and ``eval_size`` rows; the same for the same seed everywhere.

    Args:
        image_shape: of one row, as a rule channels, height and width.
        values: ``float32`` for images with a class each; ``int64`` for text, rows of ``[positions]`` codes with a
            class at each position.

    Raises:
        UserError: an argument is out of range.
    """
    check_noise(image_shape, seed, values, classes=classes, size=size, eval_size=eval_size)
    kind = Babble if values == "int64" else Noise
    return kind(image_shape, classes, size, 2 * seed), kind(image_shape, classes, eval_size, 2 * seed + 1)


def _mix(seed: int, index: int) -> int:
    """A 64-bit number that looks random (the finaliser of splitmix64)."""
    mask = (1 << 64) - 1
    z = ((index + 1) * 0x9E3779B97F4A7C15 + seed * 0xD1342543DE82EF95) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
