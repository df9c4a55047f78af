"""Characters drawn in the text fonts that come with matplotlib: images of any size in any number of classes.

Row ``i`` depends on seed and ``i`` only, so that all ranks and reruns see the same rows. Small images are drawn once
and kept as bytes; a set too large for that is drawn row by row as the loader asks (``trainer.workers`` helps).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFont, features
from torch import Tensor

from poseidon.data.cache import cached
from poseidon.data.check import check_glyphs
from poseidon.data.images import Images, Stored
from poseidon.data.sampler import derive_seed
from poseidon.errors import UserError

#: Part of the cache's file names: another number for every change of what is drawn.
_VERSION = 1
#: Without those that are easily taken for one another in some font (O and 0, I and 1, C and c ...).
_CHARACTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZabdefghnqrt"
#: Bytes of a set of rows that is drawn ahead and kept in memory (on each rank).
_MOST_KEPT = 128 << 20
#: Text fonts, beside STIXGeneral; not the folder's symbols, mathematics and display cuts.
_FAMILIES = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif")
#: Mean and standard deviation of a pixel in [0, 1]: measured, 10 classes of 1x32x32.
_MEAN, _STD = 0.22, 0.18

Pair = tuple[Images, Images]


def glyphs(image_shape: Sequence[int], classes: int, size: int = 8000, eval_size: int = 2000, seed: int = 0) -> Pair:
    """(train, evaluation) of ``size`` and ``eval_size`` rows: an image (channels, height, width) of normalised
    float32 and its class, an int64 scalar.

    Class ``k`` is always the same string (:func:`word`), in a random font, size, angle, place, contrast and noise.
    Classes follow one another, so that all are equally frequent.

    Args:
        image_shape: 1 or 3 channels, height and width, at least 8x8.

    Raises:
        UserError: an argument is out of range, or the fonts are missing.
    """
    check_glyphs(image_shape, seed, classes=classes, size=size, eval_size=eval_size)
    shape = (image_shape[0], image_shape[1], image_shape[2])
    fonts = _fonts()
    train, evaluation = (
        _rows(Drawn(shape, classes, rows, seed, part, fonts))
        for part, rows in (("train", size), ("evaluation", eval_size))
    )
    return train, evaluation


def word(number: int) -> str:
    """What class ``number`` shows: a character for the first 45, a pair for the next 2,025, then a triple ..."""
    letters = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, len(_CHARACTERS))
        letters = _CHARACTERS[letter] + letters
    return letters


class Drawn(Images):
    """Rows that are drawn when they are fetched, the same each time."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, size: int, seed: int, part: str, fonts: Sequence[str]
    ) -> None:
        super().__init__(torch.arange(size) % classes, (_MEAN,) * shape[0], (_STD,) * shape[0])
        self.shape = shape
        self.seed, self.part = seed, part
        self.fonts = list(fonts)

    def pixels(self, indices: Sequence[int]) -> Tensor:
        rows = np.empty((len(indices), *self.shape), np.uint8)
        for row, index in zip(rows, indices, strict=True):
            self._draw(row, index)
        return torch.from_numpy(rows)

    def _draw(self, row: NDArray[np.uint8], index: int) -> None:
        """Into ``row`` (channels, height, width)."""
        channels, height, width = self.shape
        random = np.random.Generator(np.random.PCG64(derive_seed(self.seed, self.part, index)))
        font = self.fonts[random.integers(len(self.fonts))]
        ink = _ink(word(int(self.labels[index])), font, height, width)
        # Numbers, not a choice: so many draws whatever the shape.
        size, angle, dx, dy, grain = random.random(5)
        paper = 10 + 60 * random.random((channels, 1, 1))
        contrast = 80 + 105 * random.random((channels, 1, 1))
        place = _turned(ink, 0.7 + 0.4 * size, 0.5 * (angle - 0.5), 0.2 * (dx - 0.5), 0.2 * (dy - 0.5), height, width)
        noise = random.integers(0, 256, row.shape, np.uint8)
        lit = np.multiply(place, contrast / 255, dtype=np.float32)
        lit += (paper - 25 * grain).astype(np.float32)
        lit += np.multiply(noise, 50 * grain / 255, dtype=np.float32)
        np.clip(lit, 0, 255, out=row, casting="unsafe")


def _rows(drawn: Drawn) -> Images:
    """The same rows, kept in memory if they are few or small enough."""
    shape = (len(drawn), *drawn.shape)
    if math.prod(shape) > _MOST_KEPT:
        return drawn
    key = (
        _VERSION,
        PIL.__version__,
        features.version("freetype2"),
        shape,
        int(drawn.labels.max()),
        drawn.seed,
        drawn.part,
    )
    name = hashlib.sha256(repr((key, [(Path(f).name, Path(f).stat().st_size) for f in drawn.fonts])).encode())
    images = cached(
        f"glyphs-{name.hexdigest()[:16]}",
        lambda: drawn.pixels(range(len(drawn))).numpy(),
        lambda array: array.shape == shape and array.dtype == np.uint8,
    )
    return Stored(torch.from_numpy(images), drawn.labels, (_MEAN,) * shape[1], (_STD,) * shape[1])


@lru_cache(maxsize=1024)
def _ink(text: str, font: str, height: int, width: int) -> Image.Image:
    """The text alone, in white on black, as large as three quarters of the image allow."""
    box = ImageFont.truetype(font, 64, layout_engine=ImageFont.Layout.BASIC).getbbox(text)
    points = 64 * 0.75 * min(height / (box[3] - box[1]), width / (box[2] - box[0]))
    mask, _ = ImageFont.truetype(font, max(points, 4.0), layout_engine=ImageFont.Layout.BASIC).getmask2(text, mode="L")
    return Image.frombytes("L", mask.size, bytes(mask))


def _turned(
    ink: Image.Image, scale: float, angle: float, dx: float, dy: float, height: int, width: int
) -> NDArray[np.uint8]:
    """``ink`` in the middle of (height, width), but scaled, turned (radians) and moved (shares of the sides)."""
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    x, y = width * (0.5 + dx), height * (0.5 + dy)  # where the text's middle comes to lie
    matrix = (cos, sin, ink.width / 2 - cos * x - sin * y, -sin, cos, ink.height / 2 + sin * x - cos * y)
    image = ink.transform((width, height), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return np.asarray(image)


def _fonts() -> list[str]:
    """Files of the fonts, in a fixed order."""
    found = find_spec("matplotlib")  # without importing it, which takes a second on every rank
    for folder in found.submodule_search_locations or () if found else ():
        files = sorted((Path(folder) / "mpl-data" / "fonts" / "ttf").glob("*.ttf"))
        if fonts := [str(file) for file in files if _is_text(file.stem)]:
            return fonts
    raise UserError(
        "dataset=glyphs draws in the fonts that come with matplotlib, which is missing: pip install matplotlib"
    )


def _is_text(name: str) -> bool:
    return name.partition("-")[0] in _FAMILIES or name.startswith("STIXGeneral")
