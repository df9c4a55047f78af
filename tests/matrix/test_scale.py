"""Thousands of small tensors, and a thousand layers: neither the start nor a step costs a message for each."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.transport import InprocEndpoint
from poseidon.transport.frames import Header, Kind
from tests.engine.nets import assert_exact, grads
from tests.matrix.harness import Case, assert_equals_one_process, mean_square, vectors
from tests.ranks import run_ranks

SIZES = [5, 3]
STEPS = 2
START_SECONDS = 10.0
#: Of one rank of two, at the start and in a step, whatever the number of tensors: a few pieces of at most 64 KiB to
#: the other's shard, the averages of one's own shard, some words.
MESSAGES = 8


class Parameters(nn.Module):
    """4,000 parameters of three elements each."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(3).to(dtypes[i % len(dtypes)]) for i in range(4000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.stack([p.to(x.dtype) for p in self.all]).sum(0) / 60).sum(1, keepdim=True)


class Around(nn.Module):
    """A layer, and a way around it, so that gradients neither vanish nor explode."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + 0.01 * torch.tanh(self.layer(x))
        return out


def chain(layer: Callable[[], nn.Module], layers: int) -> nn.Module:
    return nn.Sequential(*(Around(layer()) for _ in range(layers)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "parameters": lambda: Parameters(torch.float32),
    "of two types": lambda: Parameters(torch.float32, torch.float64),
    "norms": lambda: chain(lambda: nn.LayerNorm(3), 1000).double(),
    "linear layers": lambda: chain(lambda: nn.Linear(3, 3), 1000).double(),
}


class Counting(InprocEndpoint):
    """Counts what a rank sends, by kind of message."""

    def __init__(self, rank: int, peers: list[InprocEndpoint]) -> None:
        super().__init__(rank, peers)
        self.kinds: Counter[Kind] = Counter()

    def send(self, peer: int, header: Header, payload: Any = None, **options: Any) -> None:
        self.kinds[header.kind] += 1
        super().send(peer, header, payload, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With a state: three tensors of each parameter."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice, number: int) -> list[torch.Tensor | None]:
    x = torch.randn(sum(SIZES), 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)[rows]
    optimizer.zero_grad()
    mean_square(model(x), torch.ones(len(x))).backward()
    seen = grads(model)
    optimizer.step()
    return seen


@pytest.mark.parametrize(
    ("name", "make"), [("parameters", adam), ("of two types", sgd), ("norms", sgd), ("linear layers", sgd)]
)
def test_thousands_of_small_tensors_start_fast_and_share_messages(name: str, make: Any) -> None:
    torch.manual_seed(0)
    base = MODELS[name]()
    counting: dict[int, Any] = {}

    def body(session: Session) -> tuple[list[Any], Counter[Kind]]:
        model = copy.deepcopy(base)
        optimizer = make(model)
        begin = time.monotonic()
        session.distribute(model, optimizer, comm="hybrid")
        assert time.monotonic() - begin < START_SECONDS
        start = counting[session.rank].kinds.copy()
        rows = slice(SIZES[0]) if session.rank == 0 else slice(SIZES[0], None)
        return [train(model, optimizer, rows, number) for number in range(STEPS)], start

    def count(endpoint: Any) -> Any:
        counting[endpoint.rank] = endpoint
        return endpoint

    ranks = run_ranks(2, body, kind=Counting, wrap=count)
    optimizer = make(base)
    want = [train(base, optimizer, slice(None), number) for number in range(STEPS)]
    for rank, (seen, start) in enumerate(ranks):
        assert_exact(seen[0], want[0])
        assert start.total() <= MESSAGES, start
        assert (counting[rank].kinds - start).total() <= STEPS * MESSAGES, counting[rank].kinds
    for one, other in zip(*(seen for seen, _ in ranks), strict=True):
        assert all(map(torch.equal, one, other)), "ranks differ"


def test_a_thousand_layers_by_sufficient_factors_equal_one_process() -> None:
    case = Case(lambda: chain(lambda: nn.Linear(4, 4), 1000), vectors(4), steps=2)
    (report, *_) = assert_equals_one_process(case, "sfb", SIZES)
    assert set(report["schemes"].values()) == {"sfb"}
