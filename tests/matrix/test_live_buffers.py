"""Buffers that training reads, and those that a user writes: of rank 0, without anybody waiting for it in vain."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from poseidon.api import Session
from poseidon.errors import PeerLostError, UserError
from tests.matrix.test_agreement import same
from tests.matrix.test_buffers import READERS, Codes, batchnorm, evaluate, go_on, rows, train
from tests.ranks import run_ranks


class Average(nn.Module):
    """A moving average that the output depends on, in another tensor each time or from a later step on."""

    average: torch.Tensor

    def __init__(self, replaced: bool, start: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("average", torch.ones(4))
        self.replaced, self.start, self.calls = replaced, start, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
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

        model.get_submodule("layer").register_forward_pre_hook(look)
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
        model: Any = copy.deepcopy(base)
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
    best.get_buffer("1.running_mean").fill_(7.0)
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
    _, at, later, _ = ranks[0]
    assert all(same(first, at) for _, first, *_ in ranks)
    # No backward pass keeps the ranks together: rank 0 may still be at its first evaluation, and answers from there.
    assert all(same(second, at) or same(second, later) for *_, second, _ in ranks)
    assert ranks[0][0]["num_batches_tracked"] == 5
    assert len({digest for *_, digest in ranks}) == 1


@pytest.mark.parametrize("then", ["train", "evaluate", "leave", "gather"])
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
        if then == "gather":
            session._store = store
            session.barrier()
        if then == "train":
            go_on(session, model, optimizer, 2)
            model.state_dict()
        return model[1].running_mean.clone()

    store = dist.HashStore()
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


def test_synchronize_before_buffers_are_read_without_the_model() -> None:
    torch.manual_seed(0)
    base = batchnorm()

    def body(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(base)
        optimizer = train(session, model, "hybrid", 1)
        average = AveragedModel(model, use_buffers=True)
        for _ in range(3):
            go_on(session, model, optimizer, 1)
            session.synchronize()
            average.update_parameters(model)
        return list(average.module.buffers())

    ranks = run_ranks(2, body)
    assert same(ranks[0], ranks[1])


@pytest.mark.parametrize("make", [batchnorm, Codes])
def test_synchronize_after_the_users_own_writes(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    base = make()
    base.register_buffer("centre", torch.zeros(4))

    def body(session: Session) -> list[torch.Tensor]:
        model: Any = copy.deepcopy(base)
        optimizer = train(session, model, "hybrid", 2)
        seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(lambda *_: seen.append(model.centre.clone()))
        for _ in range(3):
            go_on(session, model, optimizer, 1)
            model.centre.lerp_(torch.full((4,), float(session.rank + 1)), 0.5)
            session.synchronize()
        return seen

    ranks = run_ranks(3, body)
    assert all(same(seen, ranks[0]) for seen in ranks)
    assert len({float(centre[0]) for centre in ranks[0]}) == 3
