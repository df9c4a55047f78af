"""Buffers: rank 0's are what everyone reads, and nobody has to ask for it."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from poseidon.api import Session
from poseidon.errors import PeerLostError, UserError
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

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("still", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
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
#: Codes has its buffers at the top.
OF_PIECES = ["piecewise", "pieces_copied"]


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [batchnorm, spectral, Codes])
def test_all_read_those_of_rank_0(make: Any, reader: str, world_size: int, comm: str) -> None:
    if reader not in ("state_dict", "evaluation") and (comm, world_size) != ("hybrid", 2):
        return
    if (make is Codes and reader in OF_PIECES) or (make is spectral and reader == "saved_whole"):
        return  # torch pickles no parametrized module
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
        def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False) -> None:
            if header.kind is Kind.STATE and counting.is_set():
                seen.append(header.unit)
            super().send(peer, header, payload, urgent=urgent)

    def body(session: Session) -> None:
        model = copy.deepcopy(base)
        optimizer = train(session, model, "ps", 2)
        session.rows(4)
        counting.set()
        go_on(session, model, optimizer, 3)
        counting.clear()

    run_ranks(2, body, kind=Watched)
    assert bool(seen) is sent


class Average(nn.Module):
    """A moving average that the output depends on, in another tensor each time or from a later step on."""

    def __init__(self, replaced: bool, start: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("average", torch.ones(4))
        self.replaced, self.start, self.calls = replaced, start, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        if self.training and self.calls >= self.start:
            if self.replaced:
                self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
            else:
                self.average.lerp_(out.detach().mean(0), 0.1)
        self.calls += 1
        return out + self.average


LIVE: dict[str, Callable[[], nn.Module]] = {
    "in place": Codes,
    "replaced": lambda: Average(True, 0),
    "in place from step 2 on": lambda: Average(False, 2),
    "replaced from step 2 on": lambda: Average(True, 2),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", LIVE)
def test_replicas_keep_the_live_buffers_of_rank_0_while_they_train(kind: str, world_size: int) -> None:
    """Under DDP likewise: each training forward pass begins with rank 0's."""
    torch.manual_seed(0)
    base = LIVE[kind]()
    before: dict[tuple[int, int], torch.Tensor] = {}

    def body(session: Session) -> None:
        model = copy.deepcopy(base)
        step = [0]

        def look(module: Any, args: Any) -> None:
            before[session.rank, step[0]] = model.get_buffer("average").clone()
            step[0] += 1

        model.layer.register_forward_pre_hook(look)
        train(session, model, "hybrid", 6)

    run_ranks(world_size, body)
    for step in range(1, 6):
        assert all(torch.equal(before[0, step], before[rank, step]) for rank in range(1, world_size))
    assert len({tuple(before[0, step].tolist()) for step in range(3, 6)}) == 3


def instance() -> nn.Module:
    norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Upsample(3), norm, nn.Flatten(), nn.Linear(18, 4))


def two_norms() -> nn.Module:
    """The second one is trained on."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("make", [batchnorm, instance, two_norms])
def test_norms_frozen_after_a_while_are_those_of_rank_0(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    base = make()

    def body(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(base)
        optimizer = train(session, model, "hybrid", 3)
        norm: Any = next(m for m in model if hasattr(m, "running_mean"))
        norm.eval()
        seen = []
        norm.register_forward_hook(lambda *_: seen.append(norm.running_mean.clone()))
        go_on(session, model, optimizer, 3)
        return seen

    ranks = run_ranks(3, body)
    for seen in ranks:
        assert len(seen) == 3
        assert all(torch.equal(mean, ranks[0][0]) and mean.any() for mean in seen)


def load_all(model: Any, best: Any) -> None:
    model.load_state_dict(best.state_dict())


def load_piece(model: Any, best: Any) -> None:
    model[1].load_state_dict(best[1].state_dict())


def by_hand(model: Any, best: Any) -> None:
    for buffer, value in zip(model.buffers(), best.buffers(), strict=True):
        buffer.copy_(value)


@pytest.mark.parametrize("load", [load_all, load_piece, by_hand])
def test_what_a_rank_has_loaded_stays_though_rank_0_has_not_loaded_it_yet(load: Callable[[Any, Any], None]) -> None:
    torch.manual_seed(0)
    base, best = batchnorm(), batchnorm()
    best[1].running_mean.fill_(7.0)  # type: ignore[index,union-attr,operator]
    read = threading.Event()

    def body(session: Session) -> torch.Tensor:
        model: Any = copy.deepcopy(base)
        optimizer = train(session, model, "ps")
        assert session.rank == 1 or read.wait(10)
        load(model, best)
        evaluate(model)
        seen: torch.Tensor = model[1].running_mean.clone()
        read.set()
        go_on(session, model, optimizer, 2)
        digests.append(session.digest(model))
        return seen

    digests: list[str] = []
    for mean in run_ranks(2, body):
        assert torch.equal(mean, torch.full((8,), 7.0))
    assert len(set(digests)) == 1


def test_loaded_live_buffers_stay() -> None:
    torch.manual_seed(0)
    base, best = Codes(), Codes()
    best.average.fill_(7.0)

    def body(session: Session) -> torch.Tensor:
        model = copy.deepcopy(base)
        optimizer = train(session, model, "ps")
        model.load_state_dict(best.state_dict())
        seen = []
        model.layer.register_forward_pre_hook(lambda *_: seen.append(model.average.clone()))
        go_on(session, model, optimizer, 1)
        return seen[0]

    for average in run_ranks(2, body):
        assert torch.equal(average, torch.full((4,), 7.0))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reader", ["state_dict", "evaluation", "piecewise", "deepcopy"])
def test_training_passes_without_backward_count(reader: str, grad: bool) -> None:
    """Statistics made anew (``update_bn``), a generator that is only used."""
    torch.manual_seed(0)
    base = batchnorm()

    def refresh(session: Session, model: nn.Module, first: int) -> None:
        with torch.set_grad_enabled(grad):
            for step in range(first, first + 3):
                model(rows(session.rank, step))

    def body(session: Session) -> tuple[Any, Any, Any, str]:
        model: Any = copy.deepcopy(base)
        optimizer = train(session, model, "hybrid", 2)
        refresh(session, model, 2)
        own = copy.deepcopy(dict(model[1].named_buffers()))
        first = READERS[reader](model)
        refresh(session, model, 5)
        second = READERS[reader](model)
        go_on(session, model, optimizer, 2)
        return own, first, second, session.digest(model)

    ranks = run_ranks(3, body)
    # No backward pass keeps the ranks together: rank 0 may be further, or not as far, when another one asks.
    _, at, later, _ = ranks[0]
    assert all(same(read, at) or same(read, later) for _, *reads, _ in ranks for read in reads)
    assert ranks[0][0]["num_batches_tracked"] == 5
    assert len({digest for *_, digest in ranks}) == 1


@pytest.mark.parametrize("then", ["train", "evaluate", "leave"])
def test_a_rank_with_more_training_passes_than_rank_0_waits_for_none(then: str) -> None:
    torch.manual_seed(0)
    base = batchnorm()

    def body(session: Session) -> Any:
        model: Any = copy.deepcopy(base)
        optimizer = train(session, model, "hybrid", 2)
        for step in range(4 * session.rank):
            model(rows(session.rank, step))
        if then == "evaluate" or session.rank == 1:
            evaluate(model)
        if then == "train":
            go_on(session, model, optimizer, 2)
            model.state_dict()
        return model[1].running_mean.clone()

    ranks = run_ranks(2, body, timeout=5)
    assert torch.equal(*ranks)


def test_converted_meanwhile() -> None:
    torch.manual_seed(0)
    base = batchnorm()
    read = threading.Event()

    def body(session: Session) -> torch.Tensor:
        model: Any = copy.deepcopy(base)
        train(session, model, "ps")
        assert session.rank == 1 or read.wait(10)
        model.double()
        model.state_dict()
        read.set()
        mean: torch.Tensor = model[1].running_mean
        return mean

    ranks = run_ranks(2, body)
    assert ranks[1].dtype == torch.float64
    assert torch.equal(*ranks)


def test_buffers_of_another_shape_are_an_error_not_a_wait() -> None:
    torch.manual_seed(0)
    base = Average(False, 0)

    def body(session: Session) -> Exception | None:
        model = copy.deepcopy(base)
        train(session, model, "ps", 2)
        model.average = torch.ones(4 + session.rank)
        try:
            model.state_dict()
        except UserError as error:
            return error
        return None

    error = run_ranks(2, body, timeout=5)[1]
    assert "buffer average is [4] on rank 0 and [5] on rank 1" in str(error)


def test_a_rank_saves_what_it_has_when_another_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    base = batchnorm()

    def body(session: Session) -> bool:
        model = copy.deepcopy(base)
        optimizer = train(session, model, "hybrid", 2)
        if session.rank == 1:
            return True
        try:
            go_on(session, model, optimizer, 2)
        except PeerLostError:
            saved, copied = model.state_dict(), copy.deepcopy(model)
            return same(saved, copied.state_dict())
        return False

    with caplog.at_level(logging.WARNING):
        assert all(run_ranks(3, body))
    assert "rank 2: saves its own buffers, not rank 0's: " in caplog.text
