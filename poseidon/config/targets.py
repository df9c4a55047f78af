"""Whether a ``_target_`` is there and takes its arguments, found out without importing it: an import could
take seconds, or start things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poseidon.config.explain import nearest
from poseidon.config.signatures import misfit
from poseidon.config.source import locate, names_in
from poseidon.errors import UserError

#: Arguments that the training loop itself gives, by position.
_POSITIONAL = {"optimizer": 1, "schedule": 1}


def check_target(key: str, node: Mapping[str, Any]) -> None:
    """Looks at the ``_target_`` of a node (without its descriptors) and of the nodes in it.

    Raises:
        UserError: there is none, its module is not to be found, the module certainly lacks the name, or what
            it names certainly does not take these arguments.
    """
    if not node.get("_target_"):
        raise UserError(f"{key}._target_: is not set; it names the class or function to call, package.module.Name")
    _check(key, node, _POSITIONAL.get(key, 0))


def _check(key: str, value: Any, positional: int = 0) -> None:
    if isinstance(value, Mapping):
        if "_target_" in value:
            _check_path(f"{key}._target_", value["_target_"])
            _check_arguments(key, value, positional)
        for name, item in value.items():
            _check(f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check(f"{key}[{number}]", item)


def _check_path(key: str, target: Any) -> None:
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise UserError(f"{key}={target}: must name a class or function as package.module.Name")
    parts = target.split(".")
    module, rest = locate(parts)
    if module is None:
        raise UserError(
            f"{key}={target}: there is no package {parts[0]} here; install it, or name its folder in PYTHONPATH"
        )
    if not rest:
        raise UserError(f"{key}={target}: is a module; name the class or function in it")
    known = names_in(module)
    if known is not None and rest[0] not in known:
        hint = nearest(rest[0], sorted(known)).rstrip()
        raise UserError(f"{key}={target}: module {module.name} has no {rest[0]}" + (f"; {hint}" if hint else ""))


def _check_arguments(key: str, node: Mapping[str, Any], positional: int) -> None:
    if "_args_" in node:
        return
    given = [str(name) for name in node if not str(name).startswith("_")]
    wrong = misfit(str(node["_target_"]), given, positional, bool(node.get("_partial_")))
    if wrong:
        raise UserError(f"{key}: {wrong} (~{key}.KEY leaves a key out, +{key}.KEY=... adds one)")
