"""Whether a ``_target_`` is there, found out without importing it: that could take seconds, or start things."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from poseidon.config.explain import nearest
from poseidon.errors import UserError


def check_target(key: str, node: Mapping[str, Any]) -> None:
    """Looks at the ``_target_`` of a node and of the nodes in it.

    Raises:
        UserError: there is none, its module is not to be found, or the module certainly lacks the name.
    """
    if not node.get("_target_"):
        raise UserError(f"{key}._target_: is not set; it names the class or function to call, package.module.Name")
    _check_nested(key, node)


def _check_nested(key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        if "_target_" in value:
            _check_path(f"{key}._target_", value["_target_"])
        for name, item in value.items():
            _check_nested(f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check_nested(f"{key}[{number}]", item)


def _check_path(key: str, target: Any) -> None:
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise UserError(f"{key}={target}: must name a class or function as package.module.Name")
    parts = target.split(".")
    module, rest = _locate(parts)
    if module is None:
        raise UserError(
            f"{key}={target}: there is no package {parts[0]} here; install it, or name its folder in PYTHONPATH"
        )
    if not rest:
        raise UserError(f"{key}={target}: is a module; name the class or function in it")
    known = _names(module)
    if known is not None and rest[0] not in known:
        hint = nearest(rest[0], sorted(known)).rstrip()
        raise UserError(f"{key}={target}: module {module.name} has no {rest[0]}" + (f"; {hint}" if hint else ""))


def _locate(parts: list[str]) -> tuple[ModuleSpec | None, list[str]]:
    """The innermost module on the way to the target, and what is left of the way."""
    # The ranks run with the current folder in their path, as `python -m` does.
    spec = PathFinder.find_spec(parts[0], [str(Path.cwd()), *sys.path])
    if spec is None:  # built in, or of an import hook (an editable install)
        try:
            spec = find_spec(parts[0])
        except (ImportError, ValueError):
            spec = None
    if spec is None:
        return None, parts
    for number, name in enumerate(parts[1:], 1):
        inner = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations or [])
        if spec.submodule_search_locations is None or inner is None:
            return spec, parts[number:]
        spec = inner
    return spec, []


def _names(module: ModuleSpec, depth: int = 3) -> set[str] | None:
    """Names at the top level of a module's source, and some from deeper in it; None if there may be others.

    Args:
        depth: star imports to follow.
    """
    if module.origin is None or not module.origin.endswith(".py"):
        return None
    try:
        source = Path(module.origin).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return None
    if any(sign in source for sign in ("__getattr__", "globals(", "exec(", "sys.modules", "setattr(")):
        return None
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                there = _starred(module, node) if depth else None
                more = _names(there, depth - 1) if there else None
                if more is None:
                    return None
                found |= more
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update(alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def _starred(module: ModuleSpec, node: ast.ImportFrom) -> ModuleSpec | None:
    """The module of ``from X import *`` in ``module``."""
    home = module.name.split(".")
    if module.submodule_search_locations is None:
        home = home[:-1]
    base = home[: len(home) - (node.level - 1)] if node.level else []
    spec, rest = _locate([*base, *(node.module or "").split(".")] if node.module else base)
    return None if rest else spec
