"""What users do with layers while their factors are caught: recompute, keep graphs, look for types, wrap."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poseidon.api import Session
from tests.engine.nets import assert_exact, grads
from tests.matrix.harness import COMMS, SIZES, mean_square
from tests.ranks import checkpoint, run_ranks

ROWS = sum(SIZES[0])


class Checkpointed(nn.Module):
    """Of every kind that is caught, under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bag = nn.Embedding(10, 30), nn.EmbeddingBag(10, 30)
        self.a, self.b, self.c = nn.Linear(30, 40), nn.Linear(40, 40, bias=False), nn.Linear(40, 3)

    def block(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.a(self.embedding(ids)))  # of (rows, positions, 30)
        return hidden.mean(1) + torch.tanh(self.b(torch.tanh(self.a(self.bag(ids)))))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, ids, use_reentrant=False)
        out: torch.Tensor = self.c(hidden)
        return out


def of(step: int) -> torch.Tensor:
    return torch.randint(0, 10, (ROWS, 4), generator=torch.Generator().manual_seed(step))


Train = Callable[[Any, Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]], Any]


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model(x), torch.ones(len(x)))


def backward_in_no_sync(model: Any, mine: Any, no_sync: Any) -> Any:
    for step in range(3):
        first = loss(model, mine(of(step))) / 2
        with no_sync():
            first.backward()
        (loss(model, mine(of(step + 50))) / 2).backward()
        yield


def forward_in_no_sync(model: Any, mine: Any, no_sync: Any) -> Any:
    for step in range(3):
        with no_sync():
            first = loss(model, mine(of(step))) / 2
            second = loss(model, mine(of(step + 50))) / 2
            first.backward()
        second.backward()
        yield


def two_forwards_first(model: Any, mine: Any, no_sync: Any) -> Any:
    """The plan is decided between a forward pass and its recomputation."""
    for step in range(3):
        both = [loss(model, mine(of(step + 50 * number))) for number in range(2)]
        for each in both:
            each.backward()
        yield


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("train", [backward_in_no_sync, forward_in_no_sync, two_forwards_first])
def test_recomputation_finds_what_the_forward_left(train: Train, overlap: Any, comm: Any) -> None:
    torch.manual_seed(0)
    base = Checkpointed()

    def run(model: nn.Module, mine: Any, session: Session | None) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        no_sync: Any = contextlib.nullcontext
        if session is not None:
            session.distribute(model, optimizer, comm=comm, overlap=overlap)
            no_sync = session.no_sync
        seen = []
        for _ in train(model, mine, no_sync):
            seen.append(grads(model))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def body(session: Session) -> list[Any]:
        first = sum(SIZES[0][: session.rank])
        return run(copy.deepcopy(base), lambda x: x[first : first + SIZES[0][session.rank]], session)

    want = run(copy.deepcopy(base), lambda x: x, None)
    for seen in run_ranks(2, body):
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
def test_a_graph_that_is_kept_over_a_step(sizes: list[int], comm: Any) -> None:
    """Of a first layer: its input needs no gradient, so that nobody needs the weights of before."""
    torch.manual_seed(0)
    base = nn.Linear(6, 40)

    def run(model: nn.Module, session: Session | None) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mine = slice(None)
        if session is not None:
            session.distribute(model, optimizer, comm=comm)
            first = sum(sizes[: session.rank])
            mine = slice(first, first + sizes[session.rank])
        seen, kept = [], None
        for step in range(5):
            x = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(step))
            now = F.softplus(model(x[mine])).mean()
            if kept is not None:
                optimizer.zero_grad()
                kept.backward()
                seen.append(grads(model))
                optimizer.step()
            kept = now
        return seen

    want = run(copy.deepcopy(base), None)
    for seen in run_ranks(len(sizes), lambda session: run(copy.deepcopy(base), session)):
        for got, expected in zip(seen, want, strict=True):
            assert_exact(got, expected)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def test_tools_find_layers_by_their_type() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    turn = threading.Barrier(2)

    def body(session: Session) -> str:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer, comm="sfb")
        for step in range(5):
            if step == 2:
                assert [type(module) for module in model] == [type(module) for module in base]
                quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
                assert not [module for module in quantized.modules() if type(module) is nn.Linear]
                for rank in range(2):  # fx hooks all modules' calls while it traces, those of other threads too
                    turn.wait(10)
                    if rank == session.rank:
                        leaves = torch.fx.symbolic_trace(model).graph.find_nodes(op="call_module", target="1")
                        assert len(leaves) == 1
                turn.wait(10)
                for name, module in list(model.named_children()):
                    if type(module) is nn.Linear:
                        setattr(model, name, LoRA(module))
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
            optimizer.zero_grad()
            model(of(step)).square().mean().backward()
            optimizer.step()
        assert session.report(model)["schemes"]["1.down"] == "sfb"
        return session.digest(model)

    assert len(set(run_ranks(2, body))) == 1


def test_a_forward_that_a_tool_wraps() -> None:
    """As offloading and quantising tools do: around the layer's own, before distribute() and after."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))

    def wrap(module: Any) -> None:
        own = module.forward
        module.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1

    def run(session: Session | None) -> list[torch.Tensor | None]:
        model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
        model.load_state_dict(base.state_dict())
        wrap(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if session is not None:
            session.distribute(model, optimizer, comm="sfb")
        wrap(model[2])
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
        if session is not None:
            assert session.report(model)["schemes"] == {"0": "ps", "2": "sfb"}
            session.undistribute(model)
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        return grads(model)

    want = run(None)
    for got in run_ranks(2, run):
        assert_exact(got, want)
