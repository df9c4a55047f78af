"""``poseidon profile``: the figures of the machine at hand, as a hardware profile in a file."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from poseidon.config.hardware import HardwareConfig, IterationConfig, LayerTable, Trust
from poseidon.config.profiles import read_profile, write_profile
from poseidon.config.schema import ProfileConfig
from poseidon.errors import UserError
from poseidon.tracking.facts import host_facts, versions
from poseidon.tracking.summary import part_name

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Measured:
    """A machine's profile, with all that was measured of it before.

    Attributes:
        model: the one that was measured now.
        seconds: of each iteration.
        flops: of one iteration.
    """

    profile: HardwareConfig
    model: str
    seconds: Sequence[float]
    flops: float


def check(config: ProfileConfig) -> None:
    """Raises UserError, before anything is measured, if its result could not be used."""
    for key, least in (("iterations", 1), ("warmup", 0)):
        if getattr(config.profile, key) < least:
            raise UserError(f"profile.{key}={getattr(config.profile, key)}: must be at least {least}")
    if config.trainer.accumulate > 1:
        raise UserError(f"trainer.accumulate={config.trainer.accumulate}: only iterations in one piece are measured")
    if not _NAME.fullmatch(_name(config)):
        raise UserError(f"hardware.name={_name(config)}: must be the name of a file: letters, digits, _, - and .")
    earlier(config)


def earlier(config: ProfileConfig) -> HardwareConfig | None:
    """What the file holds already.

    Raises:
        UserError: no profile, or not one that was measured.
    """
    path = _path(config)
    if not path.exists():
        return None
    profile = read_profile(path)
    if profile.trust is not Trust.measured:
        raise UserError(
            f"hardware.name={_name(config)}: {path} is a profile that nobody measured (trust: {profile.trust}), which "
            f"would be lost; take another name"
        )
    return profile


def measure(config: ProfileConfig) -> Measured:
    """Times iterations of the config's model on this machine.

    Raises:
        UserError: a part cannot be built, or the file holds another machine's figures.
    """
    import torch

    import poseidon
    from poseidon.emulation import measure as meter
    from poseidon.emulation.calls import trace
    from poseidon.training.parts import assemble

    torch.set_num_threads(config.cluster.threads)
    rows, options = config.trainer.batch_size, config.profile
    with poseidon.init(device=None if config.device.value == "auto" else config.device.value) as session:
        device = session.device
        before = _of_this_machine(config, device)
        parts = assemble(config, device)
        inputs, forward, iteration = _work(config, parts, device)
        seconds = meter.iteration_seconds(iteration, device, warmup=options.warmup, repeats=options.iterations)
        layers = meter.layer_seconds(parts.model, forward, device, repeats=options.iterations)
        calls = trace(parts.model, inputs)
        origin: dict[str, Any] = {"source": _source(config, device), "trust": Trust.measured}
        model = part_name(config.model) or "model"
        profile = replace(
            before,
            **origin,
            memory_bandwidth=meter.memory_bandwidth(device),
            host_copy=meter.host_copy(device),
            server_sum=meter.server_sum(),
            iterations={
                **before.iterations,
                model: IterationConfig(**origin, batch_size=rows, seconds=median(seconds)),
            },
            layers={**before.layers, model: LayerTable(**origin, batch_size=rows, seconds=layers)},
        )
    return Measured(profile, model, seconds, sum(call.forward_flops + call.backward_flops for call in calls))


def save(measured: Measured, config: ProfileConfig) -> Path:
    """Writes the profile; gives the file."""
    path = _path(config)
    write_profile(path, measured.profile)
    return path


def _work(config: ProfileConfig, parts: Any, device: torch.device) -> Any:
    """(inputs, forward, iteration) of one batch that is used again and again."""
    from poseidon.data import collate
    from poseidon.training.loader import to_device
    from poseidon.training.step import Clip, autocast

    samples = [parts.train[i % parts.train_size] for i in range(config.trainer.batch_size)]
    inputs, target = to_device(collate(samples), device)
    context = autocast(config.trainer.precision.value, device)
    parts.model.train()
    if config.trainer.clip_norm is not None:
        parts.optimizer.register_step_pre_hook(Clip(list(parts.model.parameters()), config.trainer.clip_norm))

    def forward() -> list[torch.Tensor]:
        with context():
            return [parts.loss(parts.model(inputs), target)]

    def iteration() -> None:
        parts.optimizer.zero_grad(set_to_none=True)
        forward()[0].backward()
        parts.optimizer.step()

    return inputs, forward, iteration


def _of_this_machine(config: ProfileConfig, device: torch.device) -> HardwareConfig:
    """The profile so far: what the file has, else none of the figures."""
    assert config.hardware is not None
    chosen = bool(config.hardware.iterations)  # by an experiment: another machine's
    description = (None if chosen else config.hardware.description) or _machine(config, device)
    before = earlier(config)
    if before is None:
        return HardwareConfig(name=_name(config), description=description)
    if before.description != description:
        raise UserError(
            f"hardware.name={_name(config)}: {_path(config)} was measured on another machine ({before.description}), "
            f"this is {description}; take another name"
        )
    return before


def _machine(config: ProfileConfig, device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = config.cluster.threads
    return f"{host_facts()['cpu']}, {threads} thread{'s' if threads > 1 else ''}"


def _source(config: ProfileConfig, device: torch.device) -> str:
    precision = "" if config.trainer.precision.value == "fp32" else f", {config.trainer.precision.value}"
    return (
        f"poseidon profile, {datetime.now(UTC):%Y-%m-%d}: {_machine(config, device)}, torch {versions()['torch']}"
        f"{precision}"
    )


def _name(config: ProfileConfig) -> str:
    assert config.hardware is not None
    if config.hardware.name is None and config.profile.output is not None:
        return Path(config.profile.output).stem
    return config.hardware.name or re.sub(r"[^A-Za-z0-9_.-]+", "_", socket.gethostname())


def _path(config: ProfileConfig) -> Path:
    if config.profile.output is not None:
        return Path(config.profile.output).expanduser().absolute()
    return (Path("conf") / "hardware" / f"{_name(config)}.yaml").absolute()
