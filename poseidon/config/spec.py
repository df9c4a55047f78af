"""What a rank is told: the resolved config as a JSON file. Ranks compose nothing; they know no Hydra config."""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from poseidon.config.schema import TrainConfig
from poseidon.errors import UserError


@dataclass(frozen=True)
class Spec:
    """Content of a ``spec.json``.

    Attributes:
        config: typed, enums restored.
        overrides: what was given on the command line.
        run_dir: absolute path of the run's folder.
        plain: the config as plain containers, as it lies in the file.
    """

    config: TrainConfig
    overrides: list[str]
    run_dir: str
    plain: dict[str, Any]


def dump_spec(path: Path, config: TrainConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Writes the file in one go: a reader sees all of it or none.

    Raises:
        UserError: a value in the config is none that JSON knows.
    """
    content = {"config": to_plain(config), "overrides": list(overrides), "run_dir": str(Path(run_dir).absolute())}
    try:
        text = json.dumps(content, indent=2)
    except TypeError as error:
        raise UserError(f"the config holds a value that cannot be written to {path}: {error}") from error
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def load_spec(path: str | Path) -> Spec:
    """Reads what :func:`dump_spec` wrote.

    Raises:
        UserError: there is no such file, or it is not a spec of this version.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        config = from_plain(content["config"])
        return Spec(config, content["overrides"], content["run_dir"], content["config"])
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a spec: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not a spec of this version of poseidon: {error}") from error


def to_plain(config: TrainConfig) -> dict[str, Any]:
    """The config as dicts, lists, strings and numbers; an enum is its value."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return typing.cast(dict[str, Any], plain(asdict(config)))


def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
    """Inverse of :func:`to_plain`; keys that are left out have their defaults.

    Raises:
        TypeError, ValueError: an unknown key, or a value that its enum lacks.
    """
    return typing.cast(TrainConfig, _restore(TrainConfig, plain, ""))


def _restore(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):  # of one type and None
        kind = None if value is None else next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if typing.get_origin(kind) is dict:
        _, item_kind = typing.get_args(kind)
        return {key: _restore(item_kind, item, f"{where}{key}.") for key, item in value.items()}
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return value
    unknown = set(value) - {item.name for item in fields(kind)}
    if unknown:
        raise TypeError(f"unknown key {where}{min(unknown)}")
    kinds = typing.get_type_hints(kind)
    return kind(**{key: _restore(kinds[key], item, f"{where}{key}.") for key, item in value.items()})
