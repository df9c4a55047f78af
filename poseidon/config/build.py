"""From a config node with a ``_target_`` to the object: the one place that calls hydra's ``instantiate``."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poseidon.errors import UserError

#: Keys that describe a part and are not arguments of its target, by group of the config.
DESCRIPTORS: dict[str, frozenset[str]] = {
    "dataset": frozenset({"name", "shape", "num_classes", "throughput_only"}),
    "schedule": frozenset({"name", "interval"}),
}
_NAME = frozenset({"name"})


def arguments_of(node: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The node without its descriptors; ``_target_`` and hydra's other underscored keys stay."""
    if key is None:  # a dataset says throughput_only, a schedule its interval
        key = "dataset" if "throughput_only" in node else "schedule" if "interval" in node else "part"
    left_out = DESCRIPTORS.get(key, _NAME)
    return {name: value for name, value in node.items() if name not in left_out}


def build(node: Mapping[str, Any], *args: Any, key: str | None = None) -> Any:
    """Imports the node's ``_target_`` and calls it with ``args`` and the node's other keys.

        build(config.optimizer, model.parameters(), key="optimizer")

    ``key`` is the node's place in the config (``model``, ``dataset`` ...): it decides which keys only
    describe the part and are not passed on, and stands in error messages. Lists arrive as lists. Nested nodes
    with a ``_target_`` are built first; ``_partial_: true`` gives a callable instead of its result.

    Raises:
        UserError: no target, one that cannot be imported, or one that refuses its arguments. Any other
            exception of the target's own code comes through as it is, with its traceback.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    where = key or "config"
    target = node.get("_target_")
    if not target:
        raise UserError(f"{where}._target_ is missing: name a class or function, as package.module.Name")
    try:
        return instantiate(arguments_of(node, key), *args, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise UserError(f"{where}: {cause}") from error
        if cause is None or isinstance(cause, (ImportError, OSError, TypeError, ValueError, AttributeError)):
            reason = _reason(cause) if cause is not None else str(error)
            raise UserError(f"{where}: _target_={target}: {reason}") from error
        cause.add_note(f"while building {where} (_target_={target})")
        raise cause from None


def _reason(cause: BaseException) -> str:
    """The error in one line, with the place if that is in the user's own code."""
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = " ".join(lines) or type(cause).__name__
    frames = traceback.extract_tb(cause.__traceback__)
    if frames and "site-packages" not in frames[-1].filename and "hydra" not in frames[-1].filename:
        text += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return text
