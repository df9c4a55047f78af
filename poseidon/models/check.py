"""What can be said of a model's config before anything starts; torch is imported for torchvision's networks only,
and not for the papers' own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from poseidon.errors import UserError
from poseidon.models.sizes import LAYOUT, LEAST, ShapeError, check_images, check_positive, check_transformer, features


def check(node: Mapping[str, Any]) -> None:
    """Raises UserError if a network of this package does not fit its arguments, or ``weights`` is no file.

    Of other packages' networks only ``weights`` is looked at.
    """
    if node.get("weights") is not None:
        find_weights(node["weights"])
    package, _, name = str(node.get("_target_")).rpartition(".")
    if package != "poseidon.models":
        return
    check_positive(num_classes=node.get("num_classes", 1))
    try:
        _check(name, node)
    except ShapeError as error:
        raise UserError(f"{error}{_made_for(node)}") from error


def find_weights(weights: str | Path) -> Path:
    """The file that ``model.weights`` names, absolute. Raises UserError if there is none."""
    path = Path(weights).expanduser().absolute()
    if path.is_dir():
        raise UserError(f"model.weights={weights}: {path} is a folder; name a file in it")
    if not path.is_file():
        raise UserError(f"model.weights={weights}: there is no file {path}")
    return path


def _check(name: str, node: Mapping[str, Any]) -> None:
    shape = node.get("shape")
    if name == "torchvision_model" and node.get("arch") is not None:
        if node["arch"] in LEAST and isinstance(shape, list):
            check_images(node["arch"], shape, bool(node.get("aux")))
        else:
            _try_out(json.dumps(dict(node), default=str))
    elif isinstance(shape, list) and name in LAYOUT:
        features(name, shape)
    elif isinstance(shape, list) and name == "transformer_lm":
        defaults = {"width": 128, "heads": 4, "layers": 4, "mlp_ratio": 4, "dropout": 0.0}
        check_transformer(shape, **{key: node.get(key, value) for key, value in defaults.items()})


@lru_cache(maxsize=64)  # the jobs of a sweep ask the same again and again
def _try_out(node: str) -> None:
    """Builds a network of torchvision without memory; the config as JSON."""
    from poseidon.config.schema import Part
    from poseidon.models.vision import check_options

    arguments = Part.of("model", json.loads(node)).arguments()
    known = {key: arguments.pop(key, None) for key in ("_target_", "arch", "num_classes", "shape", "aux")}
    try:
        check_options(known["arch"], known["num_classes"], known["shape"], bool(known["aux"]), arguments)
    except TypeError as error:
        raise UserError(f"model.name={known['arch']} refused its arguments: {' '.join(str(error).split())}") from error


def _made_for(node: Mapping[str, Any]) -> str:
    """What to choose instead, if the config says what data the network is made for."""
    native = node.get("native")
    if not isinstance(native, Mapping) or native.get("shape") in (None, node.get("shape")):
        return ""
    shape = "[" + ",".join(map(str, native["shape"])) + "]"
    dataset = "text" if native.get("dtype") == "int64" else "synthetic"
    return (
        f"; it is made for dataset.shape={shape} dataset.num_classes={native.get('num_classes')}, "
        f"which dataset={dataset} has"
    )
