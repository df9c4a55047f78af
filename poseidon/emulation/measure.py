"""What an iteration, its layers, and the memory of the machine at hand take: the figures of a measured profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from poseidon.config.hardware import LayerSeconds
from poseidon.emulation.segments import iterate

#: Floats of the tensors that bandwidths are measured with: more than any cache holds.
_LARGE = 16 * 1024 * 1024
_REPEATS = 5


class Clock:
    """Seconds of a device: the host's clock on the CPU, events on CUDA, where work goes on after the call."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device

    def mark(self) -> Any:
        """A moment in the device's work."""
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds. Waits until the device has come so far."""
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def time(self, work: Callable[[], object]) -> float:
        start = self.mark()
        work()
        return self.between(start, self.mark())


def iteration_seconds(work: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` runs of ``work``, a whole iteration, after ``warmup`` that do not count."""
    clock = Clock(device)
    for _ in range(warmup):
        work()
    return [clock.time(work) for _ in range(repeats)]


def layer_seconds(
    model: nn.Module, forward: Callable[[], Sequence[torch.Tensor]], device: torch.device, *, repeats: int
) -> dict[str, LayerSeconds]:
    """Seconds of each layer in one iteration, all its calls together; of each layer the median of the repeats.

    Watching costs time too: these tell the layers' shares, not how long an iteration takes.

    Args:
        forward: calls the model once, gives what is to be differentiated (the loss).
    """
    clock = Clock(device)
    found: dict[str, list[LayerSeconds]] = {}
    for _ in range(repeats):
        once: dict[str, LayerSeconds] = {}
        for layer in iterate(model, forward, clock):
            seconds = once.setdefault(layer.path, LayerSeconds())
            seconds.forward += layer.forward()
            seconds.backward += layer.backward()
        for path, seconds in once.items():
            found.setdefault(path, []).append(seconds)
    return {
        path: LayerSeconds(median(s.forward for s in many), median(s.backward for s in many))
        for path, many in found.items()
    }


def memory_bandwidth(device: torch.device) -> float:
    """bytes/s of an optimizer step of SGD with momentum, which touches 20 bytes per parameter."""
    weight = nn.Parameter(torch.zeros(_LARGE, device=device))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.step()  # makes the momentum
    return 20.0 * _LARGE / _best(optimizer.step, device)


def host_copy(device: torch.device) -> float | None:
    """bytes/s between device and host, of the slower way; None on a CPU, whose gradients are with the host already."""
    if device.type != "cuda":
        return None
    here = torch.zeros(_LARGE, pin_memory=True)
    there = torch.zeros(_LARGE, device=device)
    return here.nbytes / max(
        _best(lambda: here.copy_(there, non_blocking=True), device),
        _best(lambda: there.copy_(here, non_blocking=True), device),
    )


def server_sum() -> float:
    """bytes/s of gradients that the host adds up."""
    total, gradient = torch.zeros(_LARGE), torch.zeros(_LARGE)
    return gradient.nbytes / _best(lambda: total.add_(gradient), torch.device("cpu"))


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds when nothing disturbs."""
    clock = Clock(device)
    work()
    return min(clock.time(work) for _ in range(_REPEATS))
