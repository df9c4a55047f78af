"""SSP(s): every worker goes through the same states, which are what one process would make of the same gradients."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.engine import Engine
from tests.copies import LateCopies
from tests.engine.nets import grads
from tests.matrix.harness import Case, build, dense, share, tokens, vectors
from tests.ranks import run_ranks

ALL = ["ps", "sfb", "hybrid", "block", "project_adam"]


class Seen(NamedTuple):
    """Of one rank: by iteration c and the weights it computed with; at the end all weights."""

    cs: list[int]
    weights: list[list[torch.Tensor]]
    last: list[torch.Tensor]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def engine_of(session: Session) -> Engine:
    (engine,) = session._engines()
    return engine


def c_of(session: Session) -> int:
    stale = engine_of(session)._stale
    assert stale is not None
    return stale.applied


def train(
    case: Case,
    base: nn.Module,
    sizes: Sequence[int],
    staleness: int,
    mode: str,
    comm: str,
    wait: Callable[[int, int], None] = lambda rank, step: None,
    schedule: bool = True,
    **ranks: Any,
) -> list[Seen]:
    """On every rank `case.steps` iterations; `wait(rank, step)` before each."""

    def body(session: Session) -> Seen:
        model = copy.deepcopy(base)
        optimizer = case.optimizer(model)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        options = {"staleness": staleness, "staleness_mode": mode, **case.options}
        session.distribute(model, optimizer, comm=comm, **options)  # type: ignore[arg-type]
        cs, states = [], []
        for step in range(case.steps):
            wait(session.rank, step)
            cs.append(c_of(session))
            states.append(weights(model))
            inputs, number = share(case.data(step, sum(sizes)), session.rank, list(sizes))
            optimizer.zero_grad()
            case.take(model, optimizer, inputs, number, session)
            optimizer.step()
            if schedule:
                rates.step()
        session.synchronize()
        assert c_of(session) == case.steps - 1
        return Seen(cs, states, weights(model))

    return run_ranks(len(sizes), body, **ranks)


def replay(case: Case, base: nn.Module, sizes: Sequence[int], cs: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
    """The states G_-1, G_0 ... that one process comes to whose iterations compute with what each rank's c says."""
    model = copy.deepcopy(base)
    optimizer = case.optimizer(model)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    states = [weights(model)]
    probe = copy.deepcopy(base)
    for step in range(case.steps):
        sums: list[torch.Tensor | None] = [None] * len(states[0])
        for rank, n in enumerate(sizes):
            with torch.no_grad():
                for p, value in zip(probe.parameters(), states[cs[rank][step] + 1], strict=True):
                    p.copy_(value)
            probe.zero_grad()
            inputs, number = share(case.data(step, sum(sizes)), rank, list(sizes))
            case.take(probe, None, inputs, number, None)
            for i, grad in enumerate(map(dense, grads(probe))):
                if grad is not None:
                    part = grad * (n / sum(sizes))
                    sums[i] = part if sums[i] is None else sums[i] + part
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total
        optimizer.step()
        rates.step()
        states.append(weights(model))
    return states


def assert_is_ssp(case: Case, base: nn.Module, sizes: Sequence[int], staleness: int, seen: list[Seen]) -> None:
    for rank in seen:
        assert rank.cs == sorted(rank.cs)
        for t, c in enumerate(rank.cs):
            assert max(-1, t - 1 - staleness) <= c <= t - 1
    states = replay(case, base, sizes, [rank.cs for rank in seen])
    by_c: dict[int, list[torch.Tensor]] = {}
    for rank in seen:
        pairs = [*zip(rank.cs, rank.weights, strict=True), (case.steps - 1, rank.last)]
        for c, state in pairs:
            for mine, first in zip(state, by_c.setdefault(c, state), strict=True):
                assert torch.equal(mine, first)
            for mine, expected in zip(state, states[c + 1], strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


def mlp(steps: int = 7, **options: Any) -> Case:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 3))

    return Case(model, vectors(40), steps=steps, options=options)


def words() -> Case:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(32, 20), nn.Tanh(), nn.Linear(20, 2))

    return Case(model, tokens(30, 4), steps=6)


@pytest.mark.parametrize("comm", ALL)
@pytest.mark.parametrize("staleness", [1, 3])
def test_fixed_equals_one_process(comm: str, staleness: int) -> None:
    case, sizes = mlp(), [5, 3]
    base = build(case)
    seen = train(case, base, sizes, staleness, "fixed", comm)
    for rank in seen:
        assert rank.cs == [max(-1, t - 1 - staleness) for t in range(case.steps)]
    assert_is_ssp(case, base, sizes, staleness, seen)


@pytest.mark.parametrize(
    ("comm", "ranks"),
    [
        ("ps", {"devices": [2, 2]}),
        ("sfb", {"devices": [2, 2]}),
        ("project_adam", {"devices": [2, 2]}),
        ("block", {"devices": [2, 2]}),
        ("block", {"servers": 1}),
        ("ps", {"servers": 2}),
        ("sfb", {"servers": [1]}),
        ("hybrid", {"servers": 1}),
        ("ps", {"copies": LateCopies}),
        ("hybrid", {"copies": LateCopies}),
    ],
    ids=str,
)
def test_with_devices_and_servers_apart(comm: str, ranks: dict[str, Any]) -> None:
    case, sizes = mlp(6), [2, 3, 1, 2]
    base = build(case)
    seen = train(case, base, sizes, 2, "fixed", comm, **ranks)
    assert_is_ssp(case, base, sizes, 2, seen)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("comm", ["ps", "hybrid"])
@pytest.mark.parametrize(
    "case", [words(), mlp(merge_bytes=0), mlp(kv_bytes=1024, merge_bytes=1 << 20)], ids=["rows", "single", "merged"]
)
def test_every_kind_of_unit(comm: str, case: Case) -> None:
    base, sizes = build(case), [2, 4, 3]
    case = Case(case.model, case.inputs, optimizer=adam, steps=case.steps, options=case.options)
    assert_is_ssp(case, base, sizes, 2, train(case, base, sizes, 2, "fixed", comm))


@pytest.mark.parametrize("comm", ["ps", "sfb", "block", "project_adam"])
@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_bound_over_random_delays(comm: str, staleness: int) -> None:
    """Ranks are held back at random; who is ahead goes on, but never farther than the bound."""
    case, sizes = mlp(12), [3, 1, 2]
    base = build(case)
    for seed in range(3):
        chance = [random.Random(f"{seed}/{rank}") for rank in range(len(sizes))]
        seen = train(case, base, sizes, staleness, "newest", comm, partial(delay, chance))
        assert_is_ssp(case, base, sizes, staleness, seen)


def delay(chance: Sequence[random.Random], rank: int, step: int) -> None:
    if chance[rank].random() < 0.3:
        threading.Event().wait(chance[rank].random() * 0.02)


@pytest.mark.parametrize("comm", ["ps", "sfb", "block", "project_adam"])
def test_goes_on_as_far_as_the_bound(comm: str) -> None:
    """Rank 1 does not begin before rank 0 has come to iteration s + 1, with the initial weights; further it cannot."""
    case, sizes, staleness = mlp(9), [3, 2], 3
    base, there = build(case), threading.Event()

    def wait(rank: int, step: int) -> None:
        if rank == 0 and step == staleness + 1:
            there.set()
        elif rank == 1 and step == 1:
            assert there.wait(10)

    seen = train(case, base, sizes, staleness, "newest", comm, wait)
    # Under the first plan, by PS, rank 0 waits for round 0, and may apply it.
    assert seen[0].cs[: staleness + 2] == [-1, 0, 0, 0, 0]
    assert_is_ssp(case, base, sizes, staleness, seen)
