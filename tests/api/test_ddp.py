"""PyTorch's own all-reduce on an emulated accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from poseidon.api.ddp import DDP, _all_reduce
from poseidon.engine import Host


@pytest.fixture(autouse=True)
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Slow(Host):
    """Ends nothing by itself."""

    def __init__(self) -> None:
        self.ends: dict[str, Callable[[], None]] = {}
        self.reduced = threading.Event()

    def to_host(self, value: Any, nbytes: int, then: Callable[[Any], None]) -> None:
        self.ends["to host"] = partial(then, value)

    def summed(self, nbytes: int, then: Callable[[], None], post: Any) -> None:
        self.ends["summed"] = then

    def to_device(self, value: Any, nbytes: int, then: Callable[[Any], None]) -> None:
        self.ends["to device"] = partial(then, value)
        self.reduced.set()


class Bucket:
    def __init__(self) -> None:
        self._data = torch.ones(4)

    def buffer(self) -> torch.Tensor:
        return self._data


def test_a_ring_adds_up_while_it_transfers() -> None:
    accelerator, bucket = Slow(), Bucket()
    result = _all_reduce(accelerator, bucket)  # type: ignore[arg-type]
    assert list(accelerator.ends) == ["to host"]
    accelerator.ends["to host"]()
    assert list(accelerator.ends) == ["to host", "summed"]  # whether or not the transfer has ended
    assert not accelerator.reduced.wait(0.2)  # without the sums
    accelerator.ends["summed"]()
    assert accelerator.reduced.wait(20)  # the transfer ends in a thread of gloo
    assert not result.done()
    accelerator.ends["to device"]()
    assert torch.equal(result.wait(), torch.ones(4))


@pytest.mark.parametrize(("megabytes", "first"), [(25.0, True), (5.0, False)])
def test_the_default_bucket_size_is_left_to_pytorch(megabytes: float, first: bool) -> None:
    """Who reports DDP at its default reports its smaller first bucket, too."""
    ddp = DDP(torch.nn.Linear(2, 2), 1, megabytes, Host())
    assert ddp._wrapper.bucket_bytes_cap == megabytes * 2**20
    assert ddp._wrapper.bucket_bytes_cap_default is first
