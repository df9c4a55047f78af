"""What can be said of a model's config before anything starts; torch is imported for torchvision's names only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poseidon.models.sizes import LAYOUT, check_positive, features


def check(node: Mapping[str, Any]) -> None:
    """Raises UserError if a network of this package does not fit its arguments. Others pass unseen."""
    package, _, name = str(node.get("_target_")).rpartition(".")
    if package != "poseidon.models":
        return
    if name in LAYOUT and isinstance(node.get("shape"), list):
        features(name, node["shape"])
    if name == "torchvision_model" and node.get("arch") is not None:
        from poseidon.models.vision import check_arch

        check_arch(node["arch"])
    check_positive(num_classes=node.get("num_classes", 1))
