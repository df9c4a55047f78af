"""Hardware profiles in files, and what the schema cannot say of them: ranges, names of keys."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from poseidon.config.explain import nearest
from poseidon.config.hardware import HardwareConfig
from poseidon.errors import UserError

_HEADER = "# Measured by `poseidon profile`; what each key means: conf/hardware/titan_x.yaml.\n"
_RATES = ("flops", "flops_batchnorm", "memory_bandwidth", "host_copy", "server_sum")


def check_hardware(profile: HardwareConfig) -> None:
    """Raises UserError in one line that names the key and what it accepts."""
    for key in _RATES:
        value = getattr(profile, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"hardware.{key}={value}: must be greater than 0, or null")
    for model, entry in profile.iterations.items():
        if entry is not None:
            _positive(f"hardware.iterations.{model}", batch_size=entry.batch_size, seconds=entry.seconds)
    for model, table in profile.layers.items():
        _positive(f"hardware.layers.{model}", batch_size=table.batch_size)
        for layer, times in table.seconds.items():
            _within(
                f"hardware.layers.{model}.seconds.{layer}", 0, math.inf, forward=times.forward, backward=times.backward
            )
        if not any(times.forward + times.backward for times in table.seconds.values()):
            raise UserError(f"hardware.layers.{model}.seconds: no layer takes any time")
    known = [field.name for field in fields(profile)]
    for key in profile.sources:
        if key not in known:
            raise UserError(
                f"hardware.sources.{key}: there is no such key; {nearest(key, known)}it tells of hardware's"
            )


def _positive(where: str, **values: Any) -> None:
    for key, value in values.items():
        if not 0 < value < math.inf:
            raise UserError(f"{where}.{key}={value}: must be greater than 0")


def _within(where: str, least: float, most: float, **values: float) -> None:
    for key, value in values.items():
        if not least <= value <= most or value == math.inf:
            limit = f"lie between {least} and {most}" if most < math.inf else f"be at least {least}"
            raise UserError(f"{where}.{key}={value}: must {limit}")


def read_profile(path: Path) -> HardwareConfig:
    """A profile from its file. Raises UserError if it is none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    yaml: Any = import_module("yaml")  # has no types
    try:
        node = OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.load(path))
        profile = OmegaConf.to_object(node)
        assert isinstance(profile, HardwareConfig)
        check_hardware(profile)
        return profile
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, UserError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: is no hardware profile: {reason}") from error


def write_profile(path: Path, profile: HardwareConfig) -> None:
    """Writes the file in one go, with its folders. Raises UserError if it cannot be written."""
    yaml: Any = import_module("yaml")
    content = _plain(asdict(profile))
    first = ("name", "description", "source", "trust", "iterations")
    ordered = {key: content[key] for key in (*first, *(key for key in content if key not in first))}
    text = _HEADER + yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _plain(value: Any) -> Any:
    """Enums as their words, numbers with four digits."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
