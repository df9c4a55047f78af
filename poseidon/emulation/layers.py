"""What a model's layers take on emulated hardware: its profile's time of an iteration, shared out among their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from poseidon.config.hardware import HardwareConfig, LayerSeconds, LayerTable
from poseidon.emulation.calls import LayerCall, trace
from poseidon.errors import UserError

__all__ = ["LayerCall", "LayerTime", "layer_times", "step_bytes", "trace"]


@dataclass(frozen=True)
class LayerTime(LayerCall):
    """A call with its times.

    Attributes:
        forward, backward: seconds, undilated.
    """

    forward: float = 0.0
    backward: float = 0.0


def layer_times(
    calls: Sequence[LayerCall],
    profile: HardwareConfig,
    model_name: str,
    batch_size: int,
    *,
    step_bytes: float = 0.0,
) -> tuple[list[LayerTime], float]:
    """Seconds of each call, and of the optimizer step; all together are the profile's iteration.

    An iteration's forward and backward passes are shared out by the profile's table of layers, if it has one for this
    model, else by FLOPs. They grow linearly with the rows where ``batch_size`` is not the profile's; the step does not.

    Args:
        calls: of the model on ``batch_size`` rows, see :func:`trace`.
        model_name: by which the profile knows it, ``model.name``.
        batch_size: rows per iteration on one device.
        step_bytes: that the optimizer step reads and writes, see :func:`step_bytes`.

    Raises:
        UserError: the profile does not tell this model's time; names the key.
    """
    step = step_bytes / profile.memory_bandwidth if profile.memory_bandwidth else 0.0
    table = profile.layers.get(model_name)
    weights = _by_flops(calls) if table is None else _by_table(calls, table, model_name)
    whole = sum(forward + backward for forward, backward in weights)
    seconds = _compute(calls, profile, model_name, batch_size, step)
    if not whole:  # nothing to go by: every call the same, with a backward pass of twice the forward
        weights = [(1.0, 2.0)] * len(calls)
        whole = 3.0 * len(calls)
    return [
        LayerTime(**asdict(call), forward=forward / whole * seconds, backward=backward / whole * seconds)
        for call, (forward, backward) in zip(calls, weights, strict=True)
    ], step


def step_bytes(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], params: Iterable[nn.Parameter]) -> float:
    """Bytes that an optimizer step reads and writes, found by trying it on the meta device.

    Per parameter: w and its gradient are read, w is written, and every state (a momentum) read and written: 20 bytes
    for SGD with momentum in fp32, 28 for Adam. An optimizer that cannot be tried so counts as SGD with momentum.

    Args:
        make: builds the optimizer, as a config's ``optimizer`` does.
        params: only their shapes and types are used; those that are not trained are left out.
    """
    twins = [nn.Parameter(torch.empty_like(p, device="meta")) for p in params if p.requires_grad]
    plain = sum(p.nbytes for p in twins)
    for p in twins:
        p.grad = torch.empty_like(p)
    try:
        optimizer = make(twins)
        optimizer.step()
    except Exception:  # whatever a foreign optimizer asks of tensors without values
        return 5.0 * plain
    states = [value for p in twins for value in optimizer.state[p].values()]
    return 3.0 * plain + 2.0 * sum(t.nbytes for t in states if isinstance(t, torch.Tensor) and t.dim())


def _compute(
    calls: Sequence[LayerCall], profile: HardwareConfig, model_name: str, batch_size: int, step: float
) -> float:
    """Seconds of the forward and backward passes of one iteration."""
    entry, table = profile.iterations.get(model_name), profile.layers.get(model_name)
    if entry is not None:
        if entry.seconds <= step:
            raise UserError(
                f"hardware.memory_bandwidth={profile.memory_bandwidth:g}: the optimizer step alone would take "
                f"{step:.3g} s, the whole iteration takes hardware.iterations.{model_name}.seconds={entry.seconds:g}"
            )
        return (entry.seconds - step) * batch_size / entry.batch_size
    if table is not None:
        return table.total() * batch_size / table.batch_size
    normalises = any(call.batchnorm for call in calls)
    rate = profile.flops_batchnorm if normalises else profile.flops
    if rate is None or model_name in profile.iterations:
        raise _unknown(profile, model_name, None if model_name in profile.iterations else normalises)
    return sum(call.forward_flops + call.backward_flops for call in calls) / rate


def _unknown(profile: HardwareConfig, model_name: str, normalises: bool | None) -> UserError:
    """Args: normalises: None if the profile says that a rate does not do for this model."""
    name = profile.name or "this profile"
    rate = "" if normalises is None else f", nor hardware.{'flops_batchnorm' if normalises else 'flops'}"
    return UserError(
        f"hardware={name} has no time for model {model_name}: no hardware.iterations.{model_name}{rate}; add "
        f"'+hardware.iterations={{{model_name}: {{batch_size: ROWS, seconds: SECONDS}}}}', or measure it on such a "
        f"machine: poseidon profile model={model_name} hardware=NAME"
    )


def _by_flops(calls: Sequence[LayerCall]) -> list[tuple[float, float]]:
    return [(call.forward_flops, call.backward_flops) for call in calls]


def _by_table(calls: Sequence[LayerCall], table: LayerTable, model_name: str) -> list[tuple[float, float]]:
    """A layer's seconds, shared out among its calls by their FLOPs."""
    groups: dict[str, list[LayerCall]] = {}
    for call in calls:
        groups.setdefault(call.layer, []).append(call)
    missing = [layer for layer in groups if layer not in table.seconds]
    if missing:
        raise UserError(
            f"hardware.layers.{model_name}.seconds: there is no layer {missing[0] or '(the model itself)'}, which the "
            f"model has; it was measured on another model, or by hand"
        )
    return [_share(table.seconds[call.layer], call, groups[call.layer]) for call in calls]


def _share(seconds: LayerSeconds, call: LayerCall, group: Sequence[LayerCall]) -> tuple[float, float]:
    def part(attribute: str) -> float:
        whole = sum(getattr(other, attribute) for other in group)
        return float(getattr(call, attribute) / whole if whole else 1 / len(group))

    return seconds.forward * part("forward_flops"), seconds.backward * part("backward_flops")
