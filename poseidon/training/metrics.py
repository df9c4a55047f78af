"""Metrics: callables ``(output, target)`` that give one value per row; an evaluation is their mean."""

from __future__ import annotations

from torch import Tensor


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of right classes per row.

    Args:
        output: (rows, ..., classes) scores.
        target: (rows, ...) class indices.

    Returns:
        (rows,) floats: 0 or 1, or the mean over the positions of a row.
    """
    right = (output.argmax(dim=-1) == target).float()
    return right if right.ndim == 1 else right.flatten(1).mean(dim=1)
