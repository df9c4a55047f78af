"""What can be said of a data set's config before anything starts; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poseidon.data.folders import find_cifar, find_classes
from poseidon.errors import UserError

#: Data sets whose rows are what they are: dataset.shape and the number of classes.
_FIXED = {"mnist5k": [1, 28, 28], "digits": [1, 8, 8], "cifar10": [3, 32, 32]}
_CLASSES = 10
#: Codes of text's characters.
_CODES = 128
_SOURCES = ("python", "generated")


def check(node: Mapping[str, Any]) -> None:
    """Raises UserError if a data set of this package does not take its arguments, if its folder is not as it must be,
    or if it has not the shape and classes that the node says. Others pass unseen."""
    package, _, name = str(node.get("_target_")).rpartition(".")
    if package != "poseidon.data":
        return
    if name in _FIXED:
        _check_described(name, node.get("shape"), node.get("num_classes"))
    match name:
        case "mnist5k" | "digits":
            check_split(node.get("train_share", 0.8), node.get("split_seed", 0))
        case "synthetic":
            check_noise(node["image_shape"], node.get("seed", 0), node.get("values", "float32"), **_counts(node))
        case "glyphs":
            check_glyphs(node["image_shape"], node.get("seed", 0), **_counts(node))
        case "cifar10":
            check_cifar(node.get("folder", "data/cifar10"), node.get("augment", True))
            find_cifar(node.get("folder", "data/cifar10"))
        case "imagefolder":
            check_imagefolder(node["folder"], node["image_shape"], node["classes"])
            find_classes(node["folder"], node["classes"])
        case "text":
            _check_text(node)


def check_split(train_share: Any, split_seed: Any) -> None:
    """Raises UserError unless the share lies strictly between 0 and 1 and the seed is a whole number from 0."""
    _check_share(train_share)
    _check_count("split_seed", split_seed, 0)


def check_noise(image_shape: Any, seed: Any, values: Any = "float32", **counts: Any) -> None:
    """Raises UserError unless sides and counts are whole numbers from 1, the seed from 0, and ``values`` (of a row) of
    type float32, or int64 in one dimension."""
    _check_shape("image_shape", image_shape)
    for name, value in counts.items():
        _check_count(name, value, 1)
    _check_count("seed", seed, 0)
    if values not in ("float32", "int64"):
        raise UserError(f"values={values} must be float32 (images) or int64 (text), as dataset.dtype says")
    if values == "int64" and len(image_shape) != 1:
        raise UserError(
            f"image_shape={list(image_shape)}: dataset.dtype=int64 is for text, whose rows have one dimension: "
            "dataset.shape=[positions]"
        )


def check_glyphs(image_shape: Any, seed: Any, **counts: Any) -> None:
    """Raises UserError unless the images have 1 or 3 channels and room to draw in, and as :func:`check_noise`."""
    check_noise(image_shape, seed, **counts)
    _check_channels(image_shape)
    if min(image_shape[1:]) < 8:
        raise UserError(f"image_shape={list(image_shape)}: too small to draw in; dataset.shape must be at least 8x8")


def check_cifar(folder: Any, augment: Any) -> None:
    """Raises UserError if an argument is of the wrong type."""
    _check_path("folder", folder)
    if not isinstance(augment, bool):
        raise UserError(f"augment={augment} must be true or false")


def check_imagefolder(folder: Any, image_shape: Any, classes: Any) -> None:
    """Raises UserError unless there is the path of a folder, 1 or 3 channels and a number of classes."""
    _check_path("folder", folder)
    _check_shape("image_shape", image_shape)
    _check_count("classes", classes, 1)
    _check_channels(image_shape)


def check_text(row_shape: Any, source: Any, file: Any, characters: Any, train_share: Any, seed: Any) -> None:
    """Raises UserError if an argument of ``text`` is out of range, or there is no such file."""
    _check_shape("row_shape", row_shape)
    if len(row_shape) != 1:
        raise UserError(f"row_shape={list(row_shape)}: text has one dimension: dataset.shape=[positions], such as [64]")
    if characters is not None:
        _check_count("characters", characters, 1)
    _check_share(train_share)
    _check_count("seed", seed, 0)
    if source not in _SOURCES:
        raise UserError(f"source={source} must be {' or '.join(_SOURCES)}; a text of your own is dataset.file=PATH")
    if file is not None:
        _check_path("file", file)
        if not Path(file).expanduser().is_file():
            raise UserError(f"file={file}: there is no such file; set dataset.file to a text file, or to null")


def _check_text(node: Mapping[str, Any]) -> None:
    codes = node.get("num_classes")
    if codes is not None and codes < _CODES:
        raise UserError(f"num_classes={codes}: there are {_CODES} characters: set dataset.num_classes={_CODES}")
    check_text(
        node["row_shape"],
        source=node.get("source", "python"),
        file=node.get("file"),
        characters=node.get("characters"),
        train_share=node.get("train_share", 0.9),
        seed=node.get("seed", 0),
    )


def _check_described(name: str, shape: Any, classes: Any) -> None:
    if shape is not None and shape != _FIXED[name]:
        raise UserError(f"shape={shape}: the images of {name} are {_FIXED[name]}; leave dataset.shape at that")
    if classes is not None and classes < _CLASSES:
        raise UserError(f"num_classes={classes}: {name} has {_CLASSES} classes: set dataset.num_classes={_CLASSES}")


def _check_share(train_share: Any) -> None:
    if not isinstance(train_share, (int, float)) or not 0 < train_share < 1:
        raise UserError(f"train_share={train_share} must lie between 0 and 1, both excluded")


def _check_shape(name: str, shape: Any) -> None:
    if not isinstance(shape, (list, tuple)) or not shape:
        raise UserError(f"{name}={shape} must be a list of whole numbers, such as [3,32,32]")
    for side in shape:
        _check_count(f"{name}: a side", side, 1)


def _check_channels(image_shape: Any) -> None:
    if len(image_shape) != 3 or image_shape[0] not in (1, 3):
        raise UserError(
            f"image_shape={list(image_shape)}: dataset.shape must be [channels, height, width] with 1 or 3 channels, "
            "such as [3,32,32]"
        )


def _check_path(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name}={value}: must be a path; set dataset.{name}")


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={value} must be a whole number, at least {least}")


def _counts(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: node[key] for key in ("classes", "size", "eval_size") if key in node}
