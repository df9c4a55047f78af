"""CIFAR-10 from a folder: 60,000 photographs of 32x32 in ten classes."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.data.check import check_cifar
from poseidon.data.folders import CIFAR_HOME, CIFAR_MD5, CIFAR_ROW, find_cifar
from poseidon.data.images import Stored, shift_and_flip
from poseidon.errors import UserError

#: Of the channels of the training images, in [0, 1].
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def cifar10(folder: str = "data/cifar10", augment: bool = True) -> tuple[Stored, Stored]:
    """(train, evaluation), 50,000 and 10,000 rows: a normalised image (3, 32, 32) of float32 and its class, an int64
    scalar.

    Args:
        folder: holds ``cifar-10-batches-py`` or ``cifar-10-batches-bin``, or is one of them.
        augment: training images are shifted by up to 4 pixels and every other one is mirrored.

    Raises:
        UserError: files are missing or damaged.
    """
    check_cifar(folder, augment)
    files = find_cifar(folder)
    read = _pickled if files.pickled else _binary
    train, evaluation = (np.concatenate([read(path) for path in paths]) for paths in (files.train, files.evaluation))
    return _stored(train, augment), _stored(evaluation, False)


def _stored(rows: NDArray[np.uint8], augment: bool) -> Stored:
    """Of rows (class, then 3 x 32 x 32 pixels)."""
    images = torch.from_numpy(np.ascontiguousarray(rows[:, 1:])).view(-1, 3, 32, 32)
    labels = torch.from_numpy(rows[:, 0].astype(np.int64))
    return Stored(images, labels, _MEAN, _STD, shift_and_flip(4) if augment else None)


def _binary(path: Path) -> NDArray[np.uint8]:
    rows = np.fromfile(path, np.uint8).reshape(-1, CIFAR_ROW)
    if rows[:, 0].max() > 9:
        raise UserError(
            f"{path} is damaged: it has a class {rows[:, 0].max()}; unpack the archive of {CIFAR_HOME} again"
        )
    return rows


def _pickled(path: Path) -> NDArray[np.uint8]:
    data = path.read_bytes()
    # Unpickling runs what the bytes say, so only the published ones are.
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != CIFAR_MD5[path.name]:
        raise UserError(
            f"{path} is not the published file (its MD5 sum differs): unpack the archive of {CIFAR_HOME} again"
        )
    batch = pickle.loads(data, encoding="latin1")
    return np.column_stack([np.asarray(batch["labels"], np.uint8), batch["data"]])
