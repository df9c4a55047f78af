"""What the schema cannot say of a hardware profile: ranges, names of keys."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from poseidon.config.explain import nearest
from poseidon.config.hardware import HardwareConfig
from poseidon.errors import UserError

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
    for model, densities in profile.density.items():
        for layer, density in densities.layers.items():
            _within(f"hardware.density.{model}.layers.{layer}", 0, 1, u=density.u, v=density.v)
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
