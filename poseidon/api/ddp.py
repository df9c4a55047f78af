"""comm=ddp: PyTorch's own DistributedDataParallel under the same interface, as the reference.

DDP wraps a module; this installs the same reducer on the user's module in place, by the two methods that
DDP's own forward calls before and after the module's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from poseidon.engine import Device
from poseidon.engine.backward import Hook
from poseidon.engine.reference import Reference
from poseidon.errors import PoseidonError
from poseidon.tracing import About, Row, Tracer

#: PyTorch's own default of the bucket size, in MiB.
DEFAULT_MB = 25.0


Reduce = Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]


class DDP(Reference):
    """One model under PyTorch DDP."""

    def __init__(
        self, model: nn.Module, world_size: int, bucket_cap_mb: float, accelerator: Device, tracer: Tracer | None = None
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        self._wrapper: Any = None
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            return
        valued = accelerator.has_values
        # Its default is more than 25 MiB: left to itself, it makes the first bucket smaller, so that it leaves sooner.
        size = None if bucket_cap_mb == DEFAULT_MB else bucket_cap_mb
        wrapper: Any = DistributedDataParallel(model, bucket_cap_mb=size, init_sync=valued)
        hook: Reduce | None = None if valued else partial(_all_reduce, accelerator)
        if tracer is not None:
            hook = partial(_recorded, hook or _average, tracer, {id(p): name for name, p in model.named_parameters()})
        if hook is not None:
            chosen = hook
            wrapper.register_comm_hook(None, lambda _, bucket: chosen(bucket))  # torch wants a function
        if not (hasattr(wrapper, "_pre_forward") and hasattr(wrapper, "_post_forward")):
            raise PoseidonError(f"comm=ddp does not know torch {torch.__version__}: its DDP has no _pre_forward")
        self._wrapper = wrapper
        #: bytes a ring all-reduce sends per node and iteration (computed: DDP does not tell)
        self.bytes = 2 * (world_size - 1) / world_size * sum(p.numel() * p.itemsize for p in trained)
        self._undo = [
            model.register_forward_pre_hook(Hook(self._before), with_kwargs=True).remove,
            model.register_forward_hook(Hook(self._after)).remove,
        ]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Without grad DDP would still broadcast buffers, and hang ranks that evaluate different numbers of batches.
        if not torch.is_grad_enabled():
            return None
        return self._wrapper._pre_forward(*args, **kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        return self._wrapper._post_forward(output)

    def no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._wrapper.no_sync() if self._wrapper else nullcontext()
        return context

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._wrapper = None


def _all_reduce(accelerator: Device, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own all-reduce, between what an emulated accelerator takes to bring a bucket to its host and back. A ring
    adds up one piece while the next is on its way: its sums and its transfers go on side by side."""
    buffer, world_size = bucket.buffer(), dist.get_world_size()
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def reduce() -> None:
        transfer = dist.all_reduce(buffer, async_op=True)
        assert transfer is not None
        sums: torch.futures.Future[None] = torch.futures.Future()
        torch.futures.collect_all([transfer.get_future(), sums]).add_done_callback(reduced)
        accelerator.summed(
            buffer.nbytes * (world_size - 1) // world_size, lambda: sums.set_result(None), lambda then: then()
        )

    def reduced(both: torch.futures.Future[Any]) -> None:
        try:
            for future in both.value():
                future.value()
        except RuntimeError as error:
            result.set_exception(error)  # type: ignore[arg-type]  # torch types it as a result
        else:
            accelerator.to_device(buffer, buffer.nbytes, result.set_result)

    accelerator.to_host(buffer, buffer.nbytes, lambda _: reduce())
    return result


def _average(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does where there is no hook."""
    transfer = dist.all_reduce(bucket.buffer().mul_(1.0 / dist.get_world_size()), async_op=True)
    assert transfer is not None
    future: torch.futures.Future[torch.Tensor] = transfer.get_future().then(lambda done: done.value()[0])
    return future


def _recorded(
    reduce: Reduce, tracer: Tracer, names: Mapping[int, str], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """From when a bucket is full until its average is there, which waits for the buckets before it."""
    params = sorted(bucket.parameters(), key=lambda p: p.numel())
    layers = list(dict.fromkeys(names.get(id(p), "?").rpartition(".")[0] for p in bucket.parameters()))
    name = f"bucket {bucket.index()}: {layers[0]}" + (f" ... {layers[-1]}" if layers[1:] else "")
    about = About(name, names.get(id(params[-1]), "?").rpartition(".")[0], {"scheme": "all-reduce"})
    start, nbytes = time.monotonic(), bucket.buffer().nbytes
    with tracer.at(about):
        future = reduce(bucket)
    future.add_done_callback(lambda _: tracer.span(Row.collective, about, start, time.monotonic(), bytes=nbytes))
    return future
