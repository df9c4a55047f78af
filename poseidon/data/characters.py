"""Text as rows of characters, each with the one that follows it as its class: language modelling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from poseidon.data.check import check_text
from poseidon.data.sampler import derive_seed
from poseidon.data.tensors import Rows
from poseidon.errors import UserError

#: Characters of source=generated, unless told otherwise.
_GENERATED = 500_000


class Characters(Dataset[tuple[Tensor, ...]]):
    """Rows of (codes, the codes one character later), both int64 of (positions,); no two rows overlap.

    Args:
        codes: uint8, of one character each; what is left over for no whole row is not used.
    """

    def __init__(self, codes: Tensor, positions: int) -> None:
        self.codes = codes
        self.positions = positions

    def __len__(self) -> int:
        return max(0, len(self.codes) - 1) // self.positions

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        windows = self.codes.unfold(0, self.positions + 1, self.positions)
        chosen = windows.index_select(0, torch.tensor(indices, dtype=torch.int64)).long()
        return Rows(chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous())


def text(
    row_shape: Sequence[int],
    source: str = "python",
    file: str | None = None,
    characters: int | None = None,
    train_share: float = 0.9,
    seed: int = 0,
) -> tuple[Characters, Characters]:
    """(train, evaluation): the beginning and the rest of a text, as rows of ASCII codes, ``?`` for what is not ASCII.

    Args:
        row_shape: [positions], the characters of a row.
        source: ``python``, the documentation of the language that comes with Python (about 430,000 characters), or
            ``generated``, made-up words, each of which likes to be followed by a few others.
        file: a text file (UTF-8) to take instead.
        characters: at most so many, from the beginning; None: all there are, or 500,000 generated ones.
        seed: of the generated text.

    Raises:
        UserError: an argument is out of range, there is no such file, or it is too short.
    """
    check_text(row_shape, source, file, characters, train_share, seed)
    (positions,) = row_shape
    if file is not None:
        whole = _read(file)
    elif source == "python":
        whole = _documentation()
    else:
        whole = _generated(characters or _GENERATED, seed)
    codes = torch.from_numpy(np.frombuffer(whole[:characters].encode("ascii", "replace"), np.uint8).copy())
    cut = round(len(codes) * train_share)
    train, evaluation = Characters(codes[:cut], positions), Characters(codes[cut:], positions)
    if not len(train) or not len(evaluation):
        origin = f"source={source}" if file is None else f"file={file}"
        raise UserError(
            f"{origin}: {len(codes):,} characters with train_share={train_share} are too few for a row of {positions} "
            "to train on and one to evaluate on"
        )
    return train, evaluation


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"file={file}: cannot be read: {error.strerror}") from error


def _documentation() -> str:
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UserError(
            "source=python: this Python comes without its documentation (pydoc_data); set dataset.source=generated"
        ) from error
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]+", " ", whole))


def _generated(characters: int, seed: int) -> str:
    """Sentences of made-up words. Each word is followed by one of eight others, the first of them every other time."""
    random = np.random.Generator(np.random.PCG64(derive_seed(seed, "text")))
    words = _words(random, 256)
    followers = random.integers(0, len(words), (len(words), 8))
    said: list[str] = []
    length, word, left = 0, 0, 0
    while length < characters:
        if not left:
            left = int(random.integers(4, 12))
        choice = min(int(random.geometric(0.5)) - 1, 7)
        word, left = int(followers[word, choice]), left - 1
        said.append(words[word] + (" " if left else ".\n"))
        length += len(said[-1])
    return "".join(said)[:characters]


def _words(random: np.random.Generator, count: int) -> list[str]:
    """Different words of one to three syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = random.integers(1, 4)
        letters = zip(random.integers(0, 16, syllables), random.integers(0, 5, syllables), strict=True)
        found["".join("bdfghjklmnprstvz"[a] + "aeiou"[b] for a, b in letters)] = None
    return list(found)
