"""Image files in a folder per class, as ILSVRC12 (ImageNet) lies on a disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from poseidon.data.check import check_imagefolder
from poseidon.data.folders import find_classes, images_under
from poseidon.data.images import Images
from poseidon.errors import UserError

#: Of ImageNet's pixels, in [0, 1], by number of channels: what everybody takes, torchvision's weights included.
_MEAN = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_STD = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


class UnreadableError(UserError):
    """An image that cannot be read.

    What a data-loading process raises, PyTorch raises again with the whole traceback as the message; of that, the
    line at the end is kept.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.strip().rpartition("UnreadableError: ")[2])


class Photos(Images):
    """The images of one part, read from their files when they are fetched.

    Args:
        change: an RGB or grey image as it lies in its file, to a uint8 tensor (channels, height, width).
    """

    def __init__(self, root: Path, classes: Sequence[str], channels: int, change: Callable[[Any], Tensor]) -> None:
        files = [sorted(os.path.relpath(path, root) for path in images_under(root / name)) for name in classes]
        counts = torch.tensor([len(found) for found in files])
        super().__init__(torch.arange(len(classes)).repeat_interleave(counts), _MEAN[channels], _STD[channels])
        # One array, not a million strings: counting references would copy them into every data-loading process.
        self._files = np.array([os.fsencode(file) for found in files for file in found])
        self._root = root
        self._mode = "RGB" if channels == 3 else "L"
        self._change = change

    def pixels(self, indices: Sequence[int]) -> Tensor:
        return torch.stack([self._read(index) for index in indices])

    def _read(self, index: int) -> Tensor:
        path = self._root / os.fsdecode(self._files[index])
        try:
            with Image.open(path) as image:
                plain = image.convert(self._mode)
        except Exception as error:  # of any kind: the decoders raise what they like on damaged files
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UnreadableError(f"{path} cannot be read ({reason}): replace or remove it") from error
        return self._change(plain)


def imagefolder(folder: str, image_shape: Sequence[int], classes: int) -> tuple[Photos, Photos]:
    """(train, evaluation) of ``folder``/train/<class>/* and ``folder``/val/<class>/*: a row is a normalised image
    (channels, height, width) of float32 and its class, an int64 scalar.

    Training images are cut out at a random place and size (8 to 100 % of the area) and every other one is mirrored;
    evaluation takes the middle of the image, its shorter side scaled to 256/224 of what is cut out.

    Args:
        image_shape: 1 channel (grey) or 3, height and width of what the network sees.
        classes: how many class folders there must be.

    Raises:
        UserError: the folder is not laid out like that; later, when it is fetched, an image that cannot be read.
    """
    check_imagefolder(folder, image_shape, classes)
    names = find_classes(folder, classes)
    channels, *size = image_shape
    crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    middle = [transforms.Resize(round(max(size) * 256 / 224)), transforms.CenterCrop(size)]
    train, evaluation = (
        Photos(
            Path(folder).expanduser() / part,
            names,
            channels,
            transforms.Compose([*change, transforms.PILToTensor()]),
        )
        for part, change in (("train", crop), ("val", middle))
    )
    return train, evaluation
