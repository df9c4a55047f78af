"""Buffers: rank 0's are what everyone reads, and nobody has to ask for it."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from poseidon.api import Session
from poseidon.transport import Header, InprocEndpoint, Kind
from tests.matrix.harness import COMMS
from tests.matrix.test_agreement import same
from tests.ranks import run_ranks


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def spectral() -> nn.Module:
    """Its power iteration reads in a training forward pass what the one before has written."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4))


class Codes(nn.Module):
    """A moving average of what it saw, which its output depends on; and a counter."""

    average: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("still", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.average.lerp_(out.mean(0), 0.1)
                self.calls += 1
        return out + self.average


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(session: Session, model: nn.Module, comm: str, steps: int = 4) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
    go_on(session, model, optimizer, steps)
    return optimizer


def go_on(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(rows(session.rank, step)).square().mean().backward()
        optimizer.step()


def local(base: nn.Module, comm: str, world_size: int) -> dict[str, torch.Tensor]:
    """Rank 0's own state_dict, which nothing has synchronised."""

    def body(session: Session) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(base)
        train(session, model, comm)
        return model.state_dict()

    state: dict[str, torch.Tensor] = run_ranks(world_size, body)[0]
    return state


def evaluate(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        seen = (call or model)(torch.ones(3, 6))
    model.train()
    return seen


def piecewise(model: nn.Module) -> torch.Tensor:
    """Not by a call of the whole model: predict(), model.backbone(x) ..."""
    return evaluate(model, model[:] if isinstance(model, nn.Sequential) else model)


def saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


READERS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: {name: t.clone() for name, t in model.state_dict().items()},
    "evaluation": evaluate,
    "piecewise": piecewise,
    "deepcopy": lambda model: evaluate(copy.deepcopy(model)),
    "pieces_copied": lambda model: [list(copy.deepcopy(child).buffers()) for child in model],
    "saved_whole": lambda model: evaluate(saved_whole(model)),
}
#: Codes has its buffers at the top; re-parametrised modules cannot be pickled.
EXCEPT = {Codes: ["piecewise", "pieces_copied"], spectral: ["saved_whole"]}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [batchnorm, spectral, Codes])
def test_all_read_those_of_rank_0(make: Any, reader: str, world_size: int, comm: str) -> None:
    if reader not in ("state_dict", "evaluation") and (comm, world_size) != ("hybrid", 2):
        return
    if reader in EXCEPT.get(make, ()):
        return
    torch.manual_seed(0)
    base = make()
    alone = copy.deepcopy(base)
    alone.load_state_dict(local(base, comm, world_size))

    def body(session: Session) -> tuple[Any, str]:
        model = copy.deepcopy(base)
        optimizer = train(session, model, comm)
        seen = READERS[reader](model)
        digest = session.digest(model)
        go_on(session, model, optimizer, 2)  # and training goes on as if nobody had looked
        return seen, digest

    want = READERS[reader](alone)
    results = run_ranks(world_size, body)
    assert all(same(seen, want) for seen, _ in results)
    assert len({digest for _, digest in results}) == 1


@pytest.mark.parametrize("reader", READERS)
def test_one_rank_alone_may_read(reader: str) -> None:
    """Rank 0 trains on; rank 1 looks. Neither waits for the other to look too."""
    torch.manual_seed(0)
    base = batchnorm()

    def body(session: Session) -> str:
        model = copy.deepcopy(base)
        optimizer = train(session, model, "hybrid")
        if session.rank == 1:
            READERS[reader](model)
        go_on(session, model, optimizer, 2)
        return session.digest(model)

    assert len(set(run_ranks(3, body))) == 1


def test_after_rank_0_has_left() -> None:
    torch.manual_seed(0)
    base = batchnorm()
    want = local(base, "ps", 2)
    left = threading.Event()

    def body(session: Session) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(base)
        train(session, model, "ps")
        if session.rank == 0:
            session.close()
            left.set()
        else:
            assert left.wait(10)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        assert same(model.state_dict(), state)
        return state

    for state in run_ranks(2, body):
        assert same(state, want)


@pytest.mark.parametrize(("make", "sent"), [(batchnorm, False), (Codes, True)])
def test_what_training_only_writes_costs_nothing_while_it_trains(make: Any, sent: bool) -> None:
    torch.manual_seed(0)
    base = make()
    counting = threading.Event()
    seen: list[int] = []

    class Watched(InprocEndpoint):
        def send(self, peer: int, header: Header, payload: Any = None, **options: Any) -> None:
            if header.kind is Kind.STATE and counting.is_set():
                seen.append(header.unit)
            super().send(peer, header, payload, **options)

    def body(session: Session) -> None:
        model = copy.deepcopy(base)
        optimizer = train(session, model, "ps", 2)
        session.rows(4)
        counting.set()
        go_on(session, model, optimizer, 3)
        counting.clear()

    run_ranks(2, body, kind=Watched)
    assert bool(seen) is sent
