"""FSDP2's reductions on the CPU, by its own hook for other collectives.

FSDP2 overlaps by CUDA streams. On the CPU it has none: its reduce-scatter blocks the backward pass, and gloo's is an
all-reduce of which a rank keeps its part, so that a node would send twice the bytes. Here parts are exchanged by
gloo's all-to-all and added up in rank order, while the backward pass goes on: what FSDP does on an accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class Reductions:
    """Of one model: those on their way, until the end of the backward pass."""

    def __init__(self) -> None:
        self._running: list[torch.futures.Future[Any]] = []

    def install(self, unit: Any, parts: Sequence[nn.Parameter]) -> None:
        """Reduce the gradients of `unit`, whose own `parts` get them."""
        unit.set_custom_reduce_scatter(_ReduceScatter(self, parts))
        # Nothing is divided but by us, once it is there.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    def add(self, running: torch.futures.Future[Any]) -> None:
        if not self._running:
            Variable._execution_engine.queue_callback(self.wait)
        self._running.append(running)

    def wait(self) -> None:
        running, self._running = self._running, []
        for each in running:
            each.wait()


class _ReduceScatter(ReduceScatter):
    def __init__(self, reductions: Reductions, parts: Sequence[nn.Parameter]) -> None:
        self._reductions, self._parts = reductions, parts

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        received = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
        assert work is not None

        def add(future: torch.futures.Future[Any]) -> None:
            future.value()
            torch.mean(received.view(group.size(), -1), 0, out=output_tensor)

        self._reductions.add(work.get_future().then(add))
        if any(p.grad is not None or p._post_accumulate_grad_hooks for p in self._parts):
            self._reductions.wait()  # FSDP adds to them, or tells of them, when this returns
