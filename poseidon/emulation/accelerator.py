"""An accelerator that takes a profile's time and computes nothing.

One timeline of its own, on which layers, reconstruction and the optimizer step queue and never overlap each other; a
copy engine each way between it and its host; and the host's CPU as far as it sums gradients. Sizes are real, values
mean nothing, so that all tensors share memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from typing import Any

import torch

from poseidon.config.hardware import HardwareConfig
from poseidon.emulation.layers import LayerTime
from poseidon.emulation.timeline import Alarms, Timeline, sleep_until
from poseidon.emulation.traced import TracedTimeline
from poseidon.schemes import Contribution
from poseidon.tracing import Row, Tracer

Then = Callable[[], None]
Moved = Callable[[Any], None]


@dataclass(frozen=True)
class Costs:
    """What takes time besides the layers; seconds and bytes/s, undilated.

    Attributes:
        step: seconds of an optimizer step.
        host_copy: between device and host, each way; None: no time.
        server_sum: gradients that a host adds up; None: no time.
    """

    step: float = 0.0
    host_copy: float | None = None
    server_sum: float | None = None

    @classmethod
    def of(cls, profile: HardwareConfig, step: float) -> Costs:
        return cls(step, profile.host_copy, profile.server_sum)


class Accelerator:
    """Implements :class:`poseidon.engine.device.Device`.

    Args:
        calls: of the model's layers in a forward pass.
        dilation: of all its times (``cluster.time_dilation``).
    """

    has_values = False
    where = torch.device("cpu")

    def __init__(self, calls: Iterable[LayerTime], costs: Costs, *, dilation: float = 1.0) -> None:
        self._costs, self._dilation = costs, dilation
        self._device: Timeline = Timeline()
        self._host: dict[str, Timeline] = {"out": Timeline(), "in": Timeline(), "sum": Timeline()}
        self._lock = threading.Lock()  # of the host's timelines, which several threads ask
        self._alarms = Alarms()
        self._row_product = {weight_of(call): product_seconds(call) / call.rows for call in calls if call.rows}
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._sparse: dict[float, torch.Tensor] = {}

    def record(self, tracer: Tracer) -> None:
        """Before anything is computed: its work is to be recorded."""
        rows = {"out": Row.copy_out, "in": Row.copy_in, "sum": Row.aggregate}
        self._device = TracedTimeline(tracer, Row.device)
        self._host = {which: TracedTimeline(tracer, row) for which, row in rows.items()}

    # --- the device's own timeline -----------------------------------------------------------------------------

    def ready(self) -> None:
        """The next work depends on something that has just happened."""
        self._device.ready()

    def compute(self, seconds: float, what: str, layer: str = "") -> None:
        """Work on the device, until its end."""
        sleep_until(self._device.reserve(seconds * self._dilation, what, layer))

    def step(self, share: float = 1.0) -> None:
        """An optimizer step, or a share of one, after everything that it waits for."""
        self.ready()
        self.compute(share * self._costs.step, "optimizer step")

    def reconstruct(
        self,
        name: str,
        contributions: Sequence[Contribution],
        shape: torch.Size,
        dtype: torch.dtype,
        rows: range | None = None,
    ) -> torch.Tensor | None:
        """P x the weight's local product, P factors having come; less for only some rows of it."""
        self.ready()
        part = 1.0 if rows is None else len(rows) / shape[0]
        seconds = part * self._row_product.get(name, 0.0) * sum(c.k for c in contributions)
        self.compute(seconds, "reconstruct", name.rpartition(".")[0])
        return self.tensor(shape if rows is None else torch.Size((len(rows), *shape[1:])), dtype)

    def multiplied(
        self, contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        return self.tensor(shape, dtype)

    # --- copy engines and the host -----------------------------------------------------------------------------

    def to_host(self, value: Any, nbytes: int, then: Moved) -> None:
        self._queue("out", nbytes, self._costs.host_copy, partial(then, value))

    def to_device(self, value: Any, nbytes: int, then: Moved) -> None:
        self._queue("in", nbytes, self._costs.host_copy, partial(then, value))

    def received(self, value: Any) -> Any:
        return value

    def place(self, value: Any) -> Any:
        return value

    def summed(self, nbytes: int, then: Then, post: Callable[[Then], None]) -> None:
        if self._costs.server_sum is None:
            then()
        else:
            self._queue("sum", nbytes, self._costs.server_sum, lambda: post(then))

    def _queue(self, which: str, nbytes: int, rate: float | None, then: Then) -> None:
        if rate is None:
            then()
            return
        with self._lock:
            timeline = self._host[which]
            timeline.ready()
            self._alarms.at(timeline.reserve(nbytes / rate * self._dilation), then)

    def busy(self) -> dict[str, float]:
        """Seconds of work so far, undilated: ``device``, ``host_copy`` (of the busier way) and ``server_sum``."""
        with self._lock:
            out, into, added = (self._host[which].busy / self._dilation for which in ("out", "in", "sum"))
        return {"device": self._device.busy / self._dilation, "host_copy": max(out, into), "server_sum": added}

    # --- memory ------------------------------------------------------------------------------------------------

    def _reserve(self, numel: int, dtype: torch.dtype) -> None:
        """Have memory for the largest tensor: zeros that cost nothing until they are written."""
        if dtype not in self._memory or self._memory[dtype].numel() < numel:
            self._memory[dtype] = torch.frombuffer(mmap(-1, numel * dtype.itemsize), dtype=dtype)

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that shares its memory with all others."""
        self._reserve(max(1, shape.numel()), dtype)
        return self._memory[dtype][: shape.numel()].view(shape)

    def sparse(self, numel: int, share: float) -> torch.Tensor:
        """[numel], float32, of which that share, scattered at random, is not zero. All of one share share memory."""
        known = self._sparse.get(share)
        if known is None or len(known) < numel:
            # What is coded, sent and decoded must be as it would be; what is in it is of no account.
            chance = torch.rand(numel, generator=torch.Generator().manual_seed(0))
            known = self._sparse[share] = (chance < share).to(torch.float32)
        return known[:numel]


def weight_of(call: LayerTime) -> str:
    """Name of a linear layer's weight; "" if it is not trained."""
    return next((name for name in call.params if name.rpartition(".")[2] == "weight"), "")


def product_seconds(call: LayerTime) -> float:
    """Of a linear layer's backward pass, the time of u^T v, its weight's gradient: the forward pass's FLOPs."""
    return call.backward * min(1.0, call.forward_flops / call.backward_flops) if call.backward_flops else 0.0
