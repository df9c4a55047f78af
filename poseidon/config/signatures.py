"""Whether a target takes the arguments of its config, read from its source: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass
from importlib.machinery import ModuleSpec

from poseidon.config.source import locate, origin_of, parse

#: Decorators that leave a signature as it is.
_PLAIN = {"override", "staticmethod", "no_grad", "abstractmethod", "inference_mode", "no_type_check"}


@dataclass(frozen=True)
class Signature:
    """Of a function, or of a class's ``__init__`` without ``self``.

    Attributes:
        names: parameters that can be given by name.
        required: of these, in their order, the ones without a default.
        positional: those that can be given by position, in their order.
        open: takes any other name too.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    positional: tuple[str, ...]
    open: bool


def misfit(target: str, given: Collection[str], positional: int = 0, partial: bool = False) -> str | None:
    """What is wrong with calling ``target`` with arguments of these names; None if nothing certainly is.

    Args:
        positional: arguments that come before, by position.
        partial: more arguments will follow, so none is missing.
    """
    signature = signature_of(target)
    if signature is None:
        return None
    unknown = [name for name in given if name not in signature.names]
    if unknown and not signature.open:
        taken = set(signature.positional[:positional])
        known = ", ".join(name for name in signature.names if name not in taken)
        return f"{target} takes no {unknown[0]}; it takes {known or 'no arguments'}"
    filled = {*given, *signature.positional[:positional]}
    missing = [name for name in signature.required if name not in filled]
    return f"{target} needs {' and '.join(missing)}" if missing and not partial else None


def signature_of(target: str) -> Signature | None:
    """The signature, or None if the source does not tell for certain."""
    module, rest = locate(target.split("."))
    if module is None or len(rest) != 1:
        return None
    return _in_module(module, rest[0], 5)


def _in_module(module: ModuleSpec, name: str, depth: int) -> Signature | None:
    tree = parse(module)
    if tree is None or not depth:
        return None
    bindings = [node for node in ast.walk(tree) if _binds(node, name)]
    if not bindings:
        return _starred(module, tree, name, depth)
    if len(bindings) != 1:  # it depends on the platform or on what is installed
        return None
    node = bindings[0]
    if isinstance(node, ast.ImportFrom):
        there, source = origin_of(module, node), {a.asname or a.name: a.name for a in node.names}[name]
        return _in_module(there, source, depth - 1) if there else None
    if isinstance(node, ast.ClassDef) and _plain(node.decorator_list):
        if node.keywords:  # a metaclass may change the call
            return None
        makers = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name in ("__init__", "__new__")]
        return _of(makers[0], 1) if len(makers) == 1 and makers[0].name == "__init__" else None
    return _of(node, 0) if isinstance(node, ast.FunctionDef) and node in tree.body else None


def _starred(module: ModuleSpec, tree: ast.Module, name: str, depth: int) -> Signature | None:
    """Of a name that one ``from X import *`` brings."""
    stars = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    modules = [origin_of(module, node) for node in stars]
    found = [_in_module(there, name, depth - 1) for there in modules if there]
    certain = [signature for signature in found if signature]
    return certain[0] if len(certain) == 1 else None


def _binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name == name and node.col_offset == 0
        case ast.ImportFrom(names=names) | ast.Import(names=names):
            return any((alias.asname or alias.name) == name for alias in names)
        case ast.Name(id=found, ctx=ast.Store()):
            return found == name and node.col_offset == 0
    return False


def _of(function: ast.FunctionDef, bound: int) -> Signature | None:
    if not _plain(function.decorator_list):
        return None
    given = function.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)][bound:]
    if given.posonlyargs[bound:] or given.vararg:
        return None  # rare, and what is missing is hard to say
    optional = {*positional[len(positional) - len(given.defaults) :]} if given.defaults else set()
    keyword = [argument.arg for argument in given.kwonlyargs]
    optional |= {name for name, default in zip(keyword, given.kw_defaults, strict=True) if default is not None}
    names = (*positional, *keyword)
    required = tuple(name for name in names if name not in optional)
    return Signature(names, required, tuple(positional), given.kwarg is not None)


def _plain(decorators: list[ast.expr]) -> bool:
    for decorator in decorators:
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if name not in _PLAIN:
            return False
    return True
