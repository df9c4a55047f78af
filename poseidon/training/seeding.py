"""Random numbers of a training process."""

from __future__ import annotations

import random

import numpy as np
import torch

from poseidon.data.sampler import derive_seed


def seed_model(seed: int) -> None:
    """The same on every rank, and what ``torch.manual_seed(seed)`` in a user's own script would give."""
    _seed_all(seed)


def seed_epoch(seed: int, rank: int, epoch: int, row: int) -> None:
    """Of dropout and augmentations: other ones on each rank and in each epoch, the same in a rerun."""
    _seed_all(derive_seed(seed, "epoch", rank, epoch, row))


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
