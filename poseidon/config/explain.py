"""Hydra's and OmegaConf's exceptions in one line that names the key and what it accepts."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

#: ``names(key)``: the keys of the group ``key`` ("" is the root), [] if unknown.
Names = Callable[[str], Sequence[str]]

_CHOICE = re.compile(r"Could not find '(?P<path>[^']*)'")
_NO_LOAD = re.compile(r"Could not load '(?P<path>[^']*)'")
_OPTIONS = re.compile(r"Available options in '[^']*':\n(?P<options>(?:\t[^\n]*\n?)+)")
_WHERE = re.compile(r"^In '(?P<file>[^']*)'")
_COMPOSING = re.compile(r"^In '[^']*': \w+ raised while composing config:\n")
_FULL_KEY = re.compile(r"full_key: (?P<key>\S+)")
_AMBIGUOUS = re.compile(r"Ambiguous value for argument '(?P<argument>.*)'\n")
_TWICE = re.compile(r"Multiple values for (?P<group>[^ .]+)\.")
_NO_GROUP = re.compile(r"In '(?P<file>[^']*)': Could not override '(?P<group>[^']*)'")
_NUMBERS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def explain(error: Exception, overrides: Sequence[str] = (), names: Names = lambda key: ()) -> str:
    """The line for an exception of hydra or omegaconf.

    Args:
        overrides: the command line, to quote from.
        names: of the config without the override at fault, to tell what would have been right.
    """
    for describe in (_no_choice, _syntax, _twice, _no_override):
        line = describe(str(error), overrides)
        if line:
            return line
    cause = error.__cause__ if getattr(error, "full_key", None) is None and error.__cause__ is not None else error
    text = str(cause)
    match = _FULL_KEY.search(text)
    key = getattr(cause, "full_key", None) or (match["key"] if match else None)
    if not key:
        return _one_line(text)
    message = _COMPOSING.sub("", text.partition("\n    full_key:")[0])
    if "not in" in message and "Key '" in message:
        return _unknown(str(key), cause, _origin(error), overrides, names)
    if "nterpolation" in message:
        return f"{key}: {_one_line(message)}; set that key, or give {key} a value of its own"
    return _bad_value(str(key), cause, message, _origin(error), overrides)


def nearest(name: str, known: Sequence[str]) -> str:
    """``did you mean X? `` or nothing."""
    found = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {found[0]}? " if found else ""


def accepted(kind: Any) -> str:
    """What a key of this type takes, in words; "" if that cannot be said."""
    if isinstance(kind, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not types.NoneType]
        return f"{accepted(kinds[0])} or null".replace(" or ", ", ", 1) if _is_enum(kinds[0]) else _or_null(kinds[0])
    if _is_enum(kind):
        return _join([member.name for member in kind])
    if dataclasses.is_dataclass(kind):
        return f"a group of {_join([field.name for field in dataclasses.fields(kind)], 'and')}"
    if typing.get_origin(kind) is list:
        return "a list, written [a,b],"
    return _NUMBERS.get(kind, "")


def unknown_key(key: str, siblings: Sequence[str], place: str = "") -> str:
    """The line for a key that a closed group has not."""
    parent, _, name = key.rpartition(".")
    near = nearest(name, siblings)
    if near and parent:
        near = near.replace("did you mean ", f"did you mean {parent}.")
    if not siblings:
        return f"{key}{place}: there is no such key"
    return f"{key}{place}: there is no such key; {near}{parent or 'the config'} has {', '.join(siblings)}"


def _no_choice(text: str, overrides: Sequence[str]) -> str | None:
    several = _NO_LOAD.search(text)
    if several:
        group, _, name = several["path"].rpartition("/")
        return f"{group}={name}: cannot be loaded; {group} takes the name of one choice"
    choice = _CHOICE.search(text)
    if choice is None:
        return None
    group, _, name = choice["path"].rpartition("/")
    options = _OPTIONS.search(text)
    known = options["options"].split() if options else []
    if not group:
        return f"there is no config {name!r}"
    file = _WHERE.match(text)
    given = any(o.lstrip("+").startswith(f"{group}=") for o in overrides)
    place = f" (in {file['file']}.yaml)" if file and not given and "/" in file["file"] else ""
    if not known:
        return f"{group}={name}{place}: there is no group {group}"
    return f"{group}={name}{place}: there is no such choice; {nearest(name, known)}{group} is {_join(known)}"


def _syntax(text: str, overrides: Sequence[str]) -> str | None:
    ambiguous = _AMBIGUOUS.search(text)
    if ambiguous:
        return f"{ambiguous['argument']}: several values are a sweep: add -m; a list is written key=[a,b]"
    if "override_grammar" in text:
        text = text.partition("\nSee ")[0].removeprefix("Error parsing override ")
        bad = next((o for o in overrides if "=" not in o and not o.startswith("~")), None)
        if bad is not None:
            return f"{bad}: overrides are written key=value"
        return f"cannot read the overrides: {_one_line(text)}; values with special characters need quotes: key='...'"
    return None


def _twice(text: str, overrides: Sequence[str]) -> str | None:
    twice = _TWICE.search(text)
    if twice:
        return f"{twice['group']} has a choice already: change it with {twice['group']}=..., without +"
    if "Config group override must be a string" in text:
        bad = next((o for o in overrides if re.match(r"\+?[\w/]+=(null|[-\d.]+|true|false)$", o)), "an override")
        return f"{bad}: a group takes the name of one of its choices"
    return None


def _no_override(text: str, overrides: Sequence[str]) -> str | None:
    missing = re.search(r"'(?P<key>[^']*)' does not exist", text)
    if text.startswith("Could not delete") and missing:
        return f"~{missing['key']}: there is no such key to leave out"
    group = _NO_GROUP.search(text)
    if group:
        return f"{group['file']}.yaml: its defaults override {group['group']}, which is no group of this config"
    return None


def _unknown(key: str, cause: Any, place: str, overrides: Sequence[str], names: Names) -> str:
    parent = key.rpartition(".")[0]
    kind = getattr(cause, "object_type", None)
    siblings = list(names(parent))
    if not siblings and dataclasses.is_dataclass(kind):
        siblings = [field.name for field in dataclasses.fields(kind)]
    line = unknown_key(key, siblings, place)
    if kind is dict and not place:
        line += f"; to pass it on nevertheless: +{_given(key, overrides) or key + '=...'}"
    return line


def _bad_value(key: str, cause: Any, message: str, place: str, overrides: Sequence[str]) -> str:
    kind = getattr(cause, "object_type", None)
    wanted = ""
    if dataclasses.is_dataclass(kind):
        wanted = accepted(typing.get_type_hints(kind).get(key.rpartition(".")[2]))
    shown = _given(key, overrides) or key
    if not wanted:
        return f"{shown}{place}: {_one_line(message)}"
    found = "" if "=" in shown else f" ({_one_line(message)})"
    return f"{shown}{place}: must be {wanted}{found}"


def _given(key: str, overrides: Sequence[str]) -> str | None:
    """The override that sets ``key``."""
    for override in reversed(overrides):
        if override.lstrip("+").partition("=")[0] == key:
            return override.lstrip("+")
    return None


def _origin(error: Exception) -> str:
    """The file at fault, if it is not the command line."""
    file = _WHERE.match(str(error))
    return f" (in {file['file']}.yaml)" if file else ""


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _or_null(kind: Any) -> str:
    return f"{accepted(kind)} or null"


def _join(names: Sequence[str], word: str = "or") -> str:
    return f" {word} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _one_line(text: str) -> str:
    return " ".join(text.split())
