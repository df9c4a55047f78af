"""Tiny data sets in folders, made for a test."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from poseidon.data import cifar, folders

#: Rows of each of CIFAR-10's six files here.
ROWS = 4


def cifar_rows() -> np.ndarray:
    """(24, 3073): each file's rows in turn, the last four for evaluation; every image is of its own colours."""
    rows = np.random.default_rng(0).integers(0, 256, (6 * ROWS, 3073), np.uint8)
    rows[:, 0] %= 10
    return rows


def make_cifar(place: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Writes the python ("py") or binary ("bin") version into ``place``; its sums and sizes pass as the published."""
    place.mkdir(parents=True)
    sums = {}
    rows = cifar_rows()
    for name, part in zip(folders.CIFAR_MD5, np.split(rows, 6), strict=True):
        if version == "bin":
            (place / f"{name}.bin").write_bytes(part.tobytes())
        else:
            data = pickle.dumps({"labels": part[:, 0].tolist(), "data": part[:, 1:], "batch_label": "of a test"})
            (place / name).write_bytes(data)
            sums[name] = hashlib.md5(data).hexdigest()
    monkeypatch.setattr(cifar, "CIFAR_MD5", sums)
    monkeypatch.setattr(folders, "CIFAR_ROWS", ROWS)
    return rows


def make_photos(root: Path, classes: int = 3, train: int = 4, val: int = 2) -> None:
    """Images of one colour each, all different, of several sizes and formats; class by class."""
    number = 0
    for part, count in (("train", train), ("val", val)):
        for name in (f"n{k:03}" for k in range(classes)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for row in range(count):
                number += 1
                colour = (8 * number % 256, (37 * number) % 256, 255 - 5 * number % 256)
                image = Image.new("RGB", (20 + row, 30 - row), colour)
                image.save(folder / f"{name}_{row}.{('JPEG', 'png', 'bmp')[row % 3]}")
