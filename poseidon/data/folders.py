"""Data sets in a folder of the user's: which files there must be, found without torch and before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import UserError

CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
#: MD5 sums of the files of cifar-10-batches-py, as published: what is unpickled is these bytes or nothing.
CIFAR_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
#: Rows of each file, and bytes of a row of the binary version: class, then 3 x 32 x 32 pixels.
CIFAR_ROWS, CIFAR_ROW = 10_000, 3073
#: Endings of an image's file, in lower case.
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
_LAYOUT = "it must hold train/<class>/*.JPEG and val/<class>/*.JPEG"


@dataclass(frozen=True)
class CifarFiles:
    """Five files to train on and one to evaluate on; ``pickled``: of the python version, else of the binary one."""

    train: list[Path]
    evaluation: list[Path]
    pickled: bool


def find_cifar(folder: str) -> CifarFiles:
    """The files of CIFAR-10 in ``folder`` or in the folder that its archive unpacks to.

    Raises:
        UserError: they are not there, or not all of them, or have the wrong size.
    """
    root = Path(folder).expanduser()
    for version, ending in (("py", ""), ("bin", ".bin")):
        for place in (root / f"cifar-10-batches-{version}", root):
            files = [place / f"{name}{ending}" for name in CIFAR_MD5]
            missing = [file.name for file in files if not file.is_file()]
            if len(missing) == len(files):
                continue
            if missing:
                raise UserError(f"folder={folder}: {place} lacks {', '.join(missing)}; unpack the archive again")
            if ending:
                _check_sizes(folder, files)
            return CifarFiles(files[:-1], files[-1:], not ending)
    for archive in (root / "cifar-10-python.tar.gz", root / "cifar-10-binary.tar.gz"):
        if archive.is_file():
            raise UserError(f"folder={folder}: {archive.name} is not unpacked: tar -xzf {archive} -C {root}")
    raise UserError(
        f"folder={folder}: CIFAR-10 is not there; download cifar-10-python.tar.gz from {CIFAR_HOME} and unpack it into "
        f"{folder}, so that {root / 'cifar-10-batches-py'} exists, or set dataset.folder to where it is"
    )


def _check_sizes(folder: str, files: list[Path]) -> None:
    for file in files:
        if file.stat().st_size != CIFAR_ROWS * CIFAR_ROW:
            raise UserError(
                f"folder={folder}: {file} has {file.stat().st_size:,} bytes instead of {CIFAR_ROWS * CIFAR_ROW:,}; "
                "unpack the archive again"
            )


def find_classes(folder: str, classes: int) -> list[str]:
    """Names of the class folders, sorted: class ``k`` is the k-th.

    Raises:
        UserError: train/ and val/ do not hold the same ``classes`` folders, or there is none with images in it.
    """
    try:
        return _find_classes(folder, classes)
    except OSError as error:
        raise UserError(f"folder={folder}: cannot read {error.filename}: {error.strerror}") from error


def _find_classes(folder: str, classes: int) -> list[str]:
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(
            f"folder={folder}: there is no such folder; {_LAYOUT} (ILSVRC12: https://image-net.org), or set "
            "dataset.folder to one that does"
        )
    train, val = (_subfolders(folder, root / part) for part in ("train", "val"))
    for name in sorted({*train} ^ {*val})[:1]:
        there, lacking = ("train", "val") if name in train else ("val", "train")
        raise UserError(
            f"folder={folder}: class {name} is in {there}/ and not in {lacking}/ ({len(train)} classes in train/, "
            f"{len(val)} in val/); both must have the same"
        )
    if len(train) != classes:
        raise UserError(
            f"folder={folder}: has {len(train)} class folders, but dataset.num_classes={classes}: set "
            f"dataset.num_classes={len(train)}"
        )
    for place in (root / part / name for part in ("train", "val") for name in train):
        if next(images_under(place), None) is None:
            raise UserError(f"folder={folder}: {place} holds no image ({', '.join(IMAGES)}); add some, or remove it")
    return train


def _subfolders(folder: str, place: Path) -> list[str]:
    """Sorted names of the class folders in ``place``."""
    if not place.is_dir():
        raise UserError(f"folder={folder}: has no {place.name}/; {_LAYOUT}")
    entries = [path for path in place.iterdir() if not path.name.startswith(".")]
    if found := sorted(path.name for path in entries if path.is_dir()):
        return found
    images = sum(path.suffix.lower() in IMAGES for path in entries)
    if images:
        raise UserError(
            f"folder={folder}: {place} holds {images:,} images and no class folders (the validation images of ILSVRC12 "
            f"come like that); move each into {place.name}/<class>/, as ILSVRC2012_validation_ground_truth.txt of the "
            "development kit says"
        )
    raise UserError(f"folder={folder}: {place} is empty; {_LAYOUT}")


def images_under(place: Path | str) -> Iterator[str]:
    """Paths of all images in a folder and the folders in it, in no order, hidden ones left out."""
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from images_under(entry.path)
            elif entry.name.lower().endswith(IMAGES):
                yield entry.path
