"""FSDP2's collectives where its own would not do, by its hooks for others.

FSDP2 overlaps by CUDA streams. On the CPU it has none: its reduce-scatter blocks the backward pass, and gloo's is an
all-reduce of which a rank keeps its part, so that a node would send twice the bytes. Here parts are exchanged by
gloo's all-to-all and added up in rank order, while the backward pass goes on: what FSDP does on an accelerator.

On an emulated accelerator, whose tensors are on no device, gathers and reductions pay for host copies and sums as our
schemes and DDP do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from poseidon.engine import Device
from poseidon.tracing import About, Row, Tracer


class Collectives:
    """Of one model on the CPU; knows which reductions are on their way, until the end of the backward pass."""

    def __init__(self, accelerator: Device, tracer: Tracer | None = None) -> None:
        self._accelerator, self._tracer = accelerator, tracer
        self._running: list[torch.futures.Future[Any]] = []
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def install(self, unit: Any, name: str, parts: Sequence[nn.Parameter]) -> None:
        """For `unit`, whose own `parts` get the gradients."""
        unit.set_custom_reduce_scatter(_ReduceScatter(self, self._accelerator, name, parts))
        # Nothing is divided but by us, once it is there.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if not self._accelerator.has_values:
            unit.set_custom_all_gather(_AllGather(self, self._accelerator, name))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer; all are the same memory where there are no values."""
        if self._accelerator.has_values:
            return torch.empty(numel, dtype=dtype)
        if dtype not in self._memory or self._memory[dtype].numel() < numel:
            self._memory[dtype] = torch.empty(numel, dtype=dtype)
        return self._memory[dtype][:numel]

    def add(self, running: torch.futures.Future[Any]) -> None:
        if not self._running:
            Variable._execution_engine.queue_callback(self.wait)
        self._running.append(running)

    def wait(self) -> None:
        running, self._running = self._running, []
        start = time.monotonic()
        for each in running:
            each.wait()
        self.waited(About("reduce-scatter"), start)

    def waited(self, about: About, start: float) -> None:
        """The training thread has, since then."""
        if self._tracer is not None:
            self._tracer.span(Row.wait, about, start, time.monotonic())

    def record(self, about: About, nbytes: int, done: torch.futures.Future[Any]) -> None:
        """A collective begins."""
        if self._tracer is not None and self._tracer.recording:
            tracer, start = self._tracer, time.monotonic()
            done.add_done_callback(lambda _: tracer.span(Row.collective, about, start, time.monotonic(), bytes=nbytes))


class _Buffers:
    scheme: str

    def __init__(self, collectives: Collectives, accelerator: Device, name: str) -> None:
        self._collectives, self._accelerator = collectives, accelerator
        self._about = About(f"{self.scheme} {name or '(root)'}", name, {"scheme": self.scheme})

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._collectives.empty(torch.Size(size).numel(), dtype)


class _ReduceScatter(_Buffers, ReduceScatter):
    scheme = "reduce-scatter"

    def __init__(self, collectives: Collectives, accelerator: Device, name: str, parts: Sequence[nn.Parameter]) -> None:
        super().__init__(collectives, accelerator, name)
        self._parts = parts

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        accelerator = self._accelerator
        received = self._collectives.empty(input_tensor.numel(), input_tensor.dtype)
        done: torch.futures.Future[Any] = torch.futures.Future()

        def exchange() -> None:
            work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
            assert work is not None
            work.get_future().add_done_callback(exchanged)

        def exchanged(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
                if accelerator.has_values:
                    torch.mean(received.view(group.size(), -1), 0, out=output_tensor)
            except RuntimeError as error:
                done.set_exception(error)
            else:
                others = input_tensor.nbytes - output_tensor.nbytes
                accelerator.summed(others, summed, lambda then: then())

        def summed() -> None:
            accelerator.to_device(None, output_tensor.nbytes, done.set_result)

        self._collectives.add(done)
        self._collectives.record(self._about, input_tensor.nbytes, done)
        accelerator.to_host(None, input_tensor.nbytes, lambda _: exchange())
        if any(p.grad is not None or p._post_accumulate_grad_hooks for p in self._parts):
            self._collectives.wait()  # FSDP adds to them, or tells of them, when this returns


class _AllGather(_Buffers, AllGather):
    scheme = "all-gather"

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        accelerator = self._accelerator
        done: torch.futures.Future[Any] = torch.futures.Future()

        def gather() -> None:
            work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
            assert work is not None
            work.get_future().add_done_callback(gathered)

        def gathered(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except RuntimeError as error:
                done.set_exception(error)
            else:
                accelerator.to_device(None, output_tensor.nbytes - input_tensor.nbytes, done.set_result)

        self._collectives.record(self._about, output_tensor.nbytes, done)
        accelerator.to_host(None, input_tensor.nbytes, lambda _: gather())
        work = _Gathering(done, accelerator, self._collectives, self._about)
        if async_op:
            return work
        work.wait()
        return None


class _Gathering(dist.Work):
    """What FSDP waits for before a layer that the accelerator, too, cannot begin earlier."""

    def __init__(
        self, done: torch.futures.Future[Any], accelerator: Device, collectives: Collectives, about: About
    ) -> None:
        super().__init__()
        self._done, self._accelerator = done, accelerator
        self._collectives, self._about = collectives, about

    def wait(self, timeout: Any = None) -> bool:
        if not self._done.done():
            start = time.monotonic()
            self._done.wait()
            self._collectives.waited(self._about, start)
            self._accelerator.ready()
        self._done.value()
        return True
