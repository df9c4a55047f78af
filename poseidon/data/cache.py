"""A user's cache folder: a convenience that may be missing, read-only, full or half-written without harm."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def cache_dir() -> Path | None:
    """``$POSEIDON_CACHE``, else ``$XDG_CACHE_HOME/poseidon``, else ``~/.cache/poseidon``; None without a home."""
    if own := os.environ.get("POSEIDON_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "poseidon"
    except RuntimeError:
        return None


def cached(
    name: str, make: Callable[[], NDArray[np.uint8]], usable: Callable[[NDArray[np.uint8]], bool]
) -> NDArray[np.uint8]:
    """The array in the cache's file ``name``.npy; made, and kept if possible, when there is none that is usable.

    Safe with any number of processes at once: each may make it, and the last to finish replaces the file by
    an equal one.
    """
    folder = cache_dir()
    if folder is None:
        return make()
    path = folder / f"{name}.npy"
    with suppress(OSError, ValueError, EOFError):  # none yet, or torn by a full disk
        array: NDArray[np.uint8] = np.load(path, allow_pickle=False)
        if isinstance(array, np.ndarray) and usable(array):  # np.load reads archives too
            return array
    array = make()
    with suppress(OSError):  # read-only or full
        _keep(path, array)
    return array


def _keep(path: Path, array: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    number, part = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            np.save(file, array, allow_pickle=False)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
