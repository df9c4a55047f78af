"""How many rows a forward pass has, as its arguments show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_DEPTH = 6  # of containers in containers
_IMAGE_CHANNELS = 4


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was read.

    Attributes:
        rows: by definition: the first dimension of the first tensor, or the length of a list.
        shared: a list of tensors: the first dimension that all of them have, if they agree.
        images: a list of tensors that look like images: its length is meant.
    """

    rows: int
    shared: int | None = None
    images: bool = False

    @property
    def certain(self) -> bool:
        return self.shared is None or self.shared == self.rows

    def settle(self, outputs: Iterable[torch.Tensor]) -> tuple[int, bool]:
        """Of a list: one tensor per row, or several of all rows? The model's outputs have as many rows as its input.

        Returns:
            n_r, and is it certain?
        """
        if self.certain:
            return self.rows, True
        for t in outputs:
            if t.dim() and t.size(0) in (self.rows, self.shared):
                return t.size(0), True
        return self.rows, self.images


def leading_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reading | None:
    """The rows of the first argument that has any, looked for in containers and objects too; None without one.

    What is no tensor or list of such (numbers, names, a 0-d tensor) counts only where there is nothing else.
    """
    if args and type(args[0]) is torch.Tensor and args[0].dim():
        return Reading(args[0].size(0))
    weak: list[int] = []
    found = _first((*args, *kwargs.values()), weak, _DEPTH)
    return found or (Reading(weak[0]) if weak else None)


def _first(values: Iterable[Any], weak: list[int], depth: int) -> Reading | None:
    return next((found for value in values if (found := _of(value, weak, depth))), None)


def _of(value: Any, weak: list[int], depth: int) -> Reading | None:
    if value is None or isinstance(value, (str, bytes, int, float, nn.Module)):
        return None
    if isinstance(value, torch.Tensor):
        if value.dim():
            return Reading(value.size(0))
        weak.append(1)
        return None
    if isinstance(value, PackedSequence):
        return Reading(int(value.batch_sizes[0]))
    if isinstance(value, list):
        return _of_list(value, weak)
    return _first(_parts(value, weak), weak, depth - 1) if depth else None


def _of_list(values: list[Any], weak: list[int]) -> Reading | None:
    if not values or isinstance(values[0], (str, bytes, int, float)):
        weak.append(len(values))
        return None
    tensors = [t for t in values if isinstance(t, torch.Tensor)]
    shared = {t.size(0) if t.dim() else None for t in tensors}
    if len(shared) != 1 or shared == {None}:
        return Reading(len(values))
    (rows,) = shared
    images = all(t.dim() == 3 and t.size(0) <= _IMAGE_CHANNELS for t in tensors)
    return Reading(len(values), rows, images)


def _parts(value: Any, weak: list[int]) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, tuple):
        return value
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:  # another library's array
        weak.append(shape[0])
        return ()
    if isinstance(value, type) or callable(value):
        return ()
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())
