"""Metrics: callables ``(output, target)`` that give one value per row; an evaluation is their mean."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from poseidon.errors import UserError


def accuracy(output: Any, target: Tensor) -> Tensor:
    """Share of right classes per row.

    Args:
        output: (rows, ..., classes) or (rows, classes, ...) scores; of a tuple, the first (the others are auxiliary).
        target: (rows, ...) class indices.

    Returns:
        (rows,) floats: 0 or 1, or the mean over the positions of a row.

    Raises:
        UserError: scores and target do not go together.
    """
    scores = output[0] if isinstance(output, (tuple, list)) else output
    right: Tensor = (scores.argmax(dim=_classes_dim(scores, target)) == target).float()
    return right if right.ndim == 1 else right.flatten(1).mean(dim=1)


def _classes_dim(scores: Tensor, target: Tensor) -> int:
    """Where the classes are: last as in language models, or second as of images' pixels."""
    for dim in (-1, 1):
        if scores.ndim == target.ndim + 1 and scores.select(dim, 0).shape == target.shape:
            return dim
    raise UserError(
        f"metric: accuracy takes scores (rows, ..., classes) and class indices (rows, ...); scores are "
        f"{tuple(scores.shape)}, targets {tuple(target.shape)}"
    )
