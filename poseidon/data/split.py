"""Rows for training and rows for evaluation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from poseidon.data.check import check_split


def stratified(
    labels: NDArray[np.integer], train_share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of both parts, in random order; every class is shared out alike, rounded to whole rows.

    Args:
        labels: (rows,) classes.
        train_share: of each class, strictly between 0 and 1.
        seed: decides which rows; the same split for the same seed everywhere.

    Raises:
        UserError: the share or the seed is out of range.
    """
    check_split(train_share, seed)
    generator = np.random.Generator(np.random.PCG64(seed))
    parts: tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]] = ([], [])
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        cut = round(len(rows) * train_share)
        parts[0].append(rows[:cut])
        parts[1].append(rows[cut:])
    train, evaluation = (generator.permutation(np.concatenate(part)) for part in parts)
    return train, evaluation
