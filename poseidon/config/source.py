"""Modules and their source, found on the path without importing anything."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

#: A module whose source says one of these may have names that cannot be read off it.
_DYNAMIC = ("__getattr__", "globals(", "exec(", "sys.modules", "setattr(")


def locate(parts: Sequence[str]) -> tuple[ModuleSpec | None, list[str]]:
    """The innermost module on the way to ``a.b.Name`` (None if there is no ``a``), and the rest of the way."""
    # The ranks run with the current folder in their path, as `python -m` does.
    spec = PathFinder.find_spec(parts[0], [str(Path.cwd()), *sys.path])
    if spec is None:  # built in, or of an import hook (an editable install)
        try:
            spec = find_spec(parts[0])
        except (ImportError, ValueError):
            spec = None
    if spec is None:
        return None, list(parts)
    for number, name in enumerate(parts[1:], 1):
        if spec.submodule_search_locations is None:
            return spec, list(parts[number:])
        inner = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
        if inner is None:
            return spec, list(parts[number:])
        spec = inner
    return spec, []


def parse(module: ModuleSpec) -> ast.Module | None:
    """The module's source; None if it has none that can be read."""
    return _parse(module.origin) if module.origin and module.origin.endswith(".py") else None


def names_in(module: ModuleSpec, depth: int = 3) -> set[str] | None:
    """Names at the top level of a module's source, and some from deeper in it; None if there may be others.

    Args:
        depth: star imports to follow.
    """
    tree = parse(module)
    if tree is None or any(sign in _read(str(module.origin)) for sign in _DYNAMIC):
        return None
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                there = origin_of(module, node) if depth else None
                more = names_in(there, depth - 1) if there else None
                if more is None:
                    return None
                found |= more
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update(alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def origin_of(module: ModuleSpec, node: ast.ImportFrom) -> ModuleSpec | None:
    """The module X of ``from X import ...`` in ``module``."""
    home = module.name.split(".")
    if module.submodule_search_locations is None:
        home = home[:-1]
    base = home[: len(home) - (node.level - 1)] if node.level else []
    path = [*base, *(node.module.split(".") if node.module else [])]
    if not path:
        return None
    spec, rest = locate(path)
    return None if rest else spec


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def _parse(path: str) -> ast.Module | None:
    try:
        return ast.parse(_read(path))
    except (OSError, ValueError, SyntaxError):
        return None
