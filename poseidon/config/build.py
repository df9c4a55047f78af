"""The one place where a config's ``_target_`` becomes an object: models, datasets, losses, optimizers ..."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from poseidon.config.schema import Part
from poseidon.errors import UserError


def build(node: Mapping[str, Any], *args: Any, key: str | None = None) -> Any:
    """Calls the node's ``_target_`` with ``args`` and the node's other keys, descriptors left out.

        build(config.optimizer, model.parameters())

    Nested nodes with a ``_target_`` are built first; ``_partial_: true`` gives a partial instead of a call.
    Lists and dicts arrive as plain lists and dicts.

    Args:
        node: a group's choice.
        key: the group; it decides which keys are descriptors, and errors name it. The parts of a
            TrainConfig know theirs.

    Raises:
        UserError: in one line that names the config key: no ``_target_``, it cannot be imported, or it
            refused its arguments (TypeError, ValueError). What else the target raises comes through as it is.
    """
    part = Part.of(key or str(getattr(node, "key", "")), node)
    if not part.target:
        raise UserError(f"{_dotted(part.key, '_target_')} is not set: name a class or function, package.module.Name")
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf.errors import OmegaConfBaseException

    try:
        return instantiate(part.arguments(), *args, _convert_="all")
    except (InstantiationException, OmegaConfBaseException) as error:
        raise _explained(part, error) from error


def _explained(part: Part, error: Exception) -> Exception:
    """What to raise instead of hydra's wrapper: the target's own exception, or one line for the user."""
    cause = error.__cause__
    if isinstance(cause, UserError):
        return UserError(_keyed(part.key, str(cause)))
    if "locating target" in str(error) or cause is None:
        reason = _innermost(error)
        return UserError(f"{_dotted(part.key, '_target_')}={part.target} cannot be imported: {reason}")
    if isinstance(cause, (TypeError, ValueError)):
        frames = traceback.extract_tb(cause.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
        return UserError(_keyed(part.key, f"{part.target} refused its arguments: {_one_line(cause)}{place}"))
    if isinstance(cause, Exception):
        cause.add_note(f"while building {part.key or 'a part'} (_target_={part.target})")
        return cause
    return error


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("full_key:")]
    return " ".join(line for line in lines if line) or type(error).__name__


def _keyed(key: str, message: str) -> str:
    return f"{key}: {message}" if key else message


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
