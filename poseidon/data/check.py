"""What can be said of a data set's config before anything starts; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poseidon.errors import UserError


def check(node: Mapping[str, Any]) -> None:
    """Raises UserError if a data set of this package does not take its arguments. Others pass unseen."""
    package, _, name = str(node.get("_target_")).rpartition(".")
    if package != "poseidon.data":
        return
    if name in ("mnist5k", "digits"):
        check_split(node.get("train_share", 0.8), node.get("split_seed", 0))
    if name == "glyphs":
        check_glyphs(
            node["image_shape"], node["classes"], node.get("size", 1), node.get("eval_size", 1), node.get("seed", 0)
        )
    if name == "synthetic":
        counts = {key: node[key] for key in ("classes", "size", "eval_size") if key in node}
        check_noise(node["image_shape"], node.get("seed", 0), **counts)


def check_split(train_share: Any, split_seed: Any) -> None:
    """Raises UserError unless the share lies strictly between 0 and 1 and the seed is a whole number from 0."""
    if not isinstance(train_share, (int, float)) or not 0 < train_share < 1:
        raise UserError(f"train_share={train_share} must lie between 0 and 1, both excluded")
    _check_count("split_seed", split_seed, 0)


def check_noise(image_shape: Any, seed: Any, **counts: Any) -> None:
    """Raises UserError unless sides and counts are whole numbers from 1, the seed from 0."""
    if not isinstance(image_shape, (list, tuple)) or not image_shape:
        raise UserError(f"image_shape={image_shape} must be a list of whole numbers, such as [3,32,32]")
    for side in image_shape:
        _check_count("image_shape: a side", side, 1)
    for name, value in counts.items():
        _check_count(name, value, 1)
    _check_count("seed", seed, 0)


def check_glyphs(image_shape: Any, classes: Any, size: Any, eval_size: Any, seed: Any) -> None:
    """Raises UserError unless the images have 1 or 3 channels and room to draw in, and as :func:`check_noise`."""
    check_noise(image_shape, seed, classes=classes, size=size, eval_size=eval_size)
    _check_channels(image_shape)
    if min(image_shape[1:]) < 8:
        raise UserError(
            f"image_shape={list(image_shape)}: too small to draw characters in; at least 8x8 (dataset.shape)"
        )


def _check_channels(image_shape: Any) -> None:
    if not (isinstance(image_shape, (list, tuple)) and len(image_shape) == 3 and image_shape[0] in (1, 3)):
        raise UserError(
            f"image_shape={image_shape}: must be [channels, height, width] with 1 or 3 channels, such as [3,32,32] "
            "(dataset.shape)"
        )


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={value} must be a whole number, at least {least}")
