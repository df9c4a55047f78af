"""SSP(s) in scripts: what works as ever, and what is told in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.engine import memory
from poseidon.errors import UserError
from poseidon.planning import FactorSize, Param, buffered, build_book
from poseidon.planning.topology import Topology
from tests.matrix.harness import build, share
from tests.matrix.test_staleness import c_of, mlp, weights
from tests.ranks import run_ranks

SIZES = [4, 2]
Step = Callable[[Session, nn.Module, torch.optim.Optimizer, torch.Tensor, int], None]


def forward(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, step: int) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()


def trained(
    step: Step = forward,
    mode: str = "fixed",
    staleness: int = 2,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9
    ),
    after: Callable[[Session, nn.Module, torch.optim.Optimizer, int], Any] = lambda *_: None,
    steps: int = 5,
    sizes: list[int] = SIZES,
    **options: Any,
) -> list[list[torch.Tensor]]:
    """Each rank's last weights."""
    case = mlp()
    base = build(case)

    def body(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(base)
        its = optimizer(model)
        chosen = {"comm": "hybrid", "staleness": staleness, "staleness_mode": mode, **options}
        session.distribute(model, its, **chosen)
        for number in range(steps):
            (x,), _ = share(case.data(number, sum(sizes)), session.rank, sizes)
            step(session, model, its, x, number)
            its.step()
            after(session, model, its, number)
        session.synchronize()
        return weights(model)

    return run_ranks(len(sizes), body)


def assert_same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]], *, exact: bool = True) -> None:
    for a, b in zip([t for rank in one for t in rank], [t for rank in other for t in rank], strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)


def test_reruns_of_fixed_are_bit_identical() -> None:
    assert_same(trained(), trained())


def test_zeroed_in_place_or_after_the_step() -> None:
    def in_place(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()

    def late(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
        model(x).square().mean().backward()

    plain = trained()
    assert_same(trained(in_place), plain)
    assert_same(trained(late, after=lambda session, model, optimizer, step: optimizer.zero_grad()), plain)


def test_accumulates_inside_no_sync() -> None:
    def halves(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
        optimizer.zero_grad()
        half = len(x) // 2
        with session.no_sync():
            (model(x[:half]).square().mean() / 2).backward()
        (model(x[half:]).square().mean() / 2).backward()

    assert_same(trained(halves), trained(), exact=False)


def test_clips_after_backward_where_one_average_is_applied_at_a_time() -> None:
    def clip(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
        forward(session, model, optimizer, x, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def clipping(model: nn.Module) -> torch.optim.Optimizer:
        def hook(*_: object) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer.register_step_pre_hook(hook)
        return optimizer

    seen: list[list[torch.Tensor]] = []

    def look(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
        if session.rank == 0 and step == 6:
            seen.append(weights(model))

    trained(clip, steps=7, after=look)
    trained(optimizer=clipping, steps=7, after=look)
    trained(steps=7, after=look)
    assert_same([seen[0]], [seen[1]])
    assert not torch.equal(seen[0][0], seen[2][0])
    with pytest.raises(UserError, match=r"clipping\?.*register_step_pre_hook.*staleness_mode=fixed"):
        trained(clip, mode="newest", steps=9)
    trained(optimizer=clipping, mode="newest")


class Counting(torch.optim.SGD):
    """Keeps a count in its parameter groups, as some optimizers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.grad is not None for p in self.param_groups[0]["params"]):
            self.param_groups[0]["k"] += 1
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"] / self.param_groups[0]["k"])


def test_state_in_parameter_groups_is_the_optimizers() -> None:
    counts: list[int] = []
    trained(
        optimizer=Counting, steps=6, after=lambda session, model, its, step: counts.append(its.param_groups[0]["k"])
    )
    assert sorted(counts) == sorted([0, 0, 1, 2, 3, 4] * 2)


@pytest.mark.parametrize("mode", ["newest", "fixed"])
@pytest.mark.parametrize(
    "read",
    [
        lambda session, model, optimizer: model.state_dict(),
        lambda session, model, optimizer: optimizer.state_dict(),
        lambda session, model, optimizer: model.load_state_dict(model.state_dict()),
        lambda session, model, optimizer: session.digest(model),
        lambda session, model, optimizer: session.synchronize(),
        lambda session, model, optimizer: evaluate(model),
        lambda session, model, optimizer: session.undistribute(model),
        lambda session, model, optimizer: session.close(),
    ],
    ids=["state_dict", "optimizer", "load", "digest", "synchronize", "eval", "undistribute", "close"],
)
def test_read_weights_are_the_newest(read: Callable[..., Any], mode: str) -> None:
    case = mlp()
    base = build(case)

    def body(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        session.distribute(model, optimizer, staleness=4, staleness_mode=mode)  # type: ignore[arg-type]
        for number in range(3):
            (x,), _ = share(case.data(number, 6), session.rank, SIZES)
            forward(session, model, optimizer, x, number)
            optimizer.step()
        if mode == "fixed":
            assert c_of(session) == -1
        read(session, model, optimizer)
        return weights(model)

    one, other = run_ranks(2, body)
    assert_same([one], [other])
    assert not torch.equal(one[0], weights(base)[0])


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 40))
    model.train()


def test_weights_stand_still_within_an_iteration() -> None:
    def peek(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
        optimizer.zero_grad()
        before = weights(model)
        loss = model(x).square().mean()
        model.state_dict()
        evaluate(model)
        loss.backward()
        model.state_dict()
        assert_same([weights(model)], [before])

    assert_same(trained(peek), trained())


def test_a_rank_without_rows() -> None:
    def nothing(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
        optimizer.zero_grad()
        if session.rank == 1 and step % 2:
            session.rows(0)
        else:
            model(x).square().mean().backward()

    one, other = trained(nothing)
    assert_same([one], [other])


def test_a_model_that_is_frozen_as_a_whole() -> None:
    def frozen(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
        model.requires_grad_(False)
        model(x)

    one, other = trained(frozen)
    assert_same([one], [other])


def twice(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
    forward(session, model, optimizer, x, step)
    model(x).square().mean().backward()


def unzeroed(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
    model(x).square().mean().backward()


def second(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
    forward(session, model, optimizer, x, step)
    torch.optim.SGD(model.parameters(), 0.1).step()


def closure(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
    optimizer.step(lambda: forward(session, model, optimizer, x, step))


def joined(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, step: int) -> None:
    with session.join():
        forward(session, model, optimizer, x, step)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (twice, r"backward pass 1 before the step .*no_sync\(\)"),
        (unzeroed, r"not zeroed .* optimizer\.zero_grad\(\)"),
        (second, "a second optimizer steps this model"),
        (closure, "with a closure"),
        (joined, r"session\.join\(\) is not for models that train with staleness"),
    ],
    ids=["twice", "unzeroed", "second", "closure", "join"],
)
def test_refused_in_one_line(step: Step, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        trained(step, steps=6)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"staleness": -1}, "must not be negative"),
        ({"staleness": 1, "comm": "ddp"}, "comm='ddp' has none"),
        ({"staleness_mode": "slow"}, "staleness_mode='slow' is not one of newest, fixed"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    def body(session: Session) -> None:
        model = nn.Linear(2, 2)
        session.distribute(model, torch.optim.SGD(model.parameters(), 0.1), **options)

    with pytest.raises(UserError, match=words):
        run_ranks(2, body)


def test_another_optimizer_takes_over_between_steps() -> None:
    """What the first one has stepped for, it applies itself."""
    case = mlp()
    base = build(case)

    def body(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(base)
        both = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.0)]
        session.distribute(model, both[0], staleness=2, staleness_mode="fixed")
        for number in range(6):
            (x,), _ = share(case.data(number, 6), session.rank, SIZES)
            forward(session, model, both[0], x, number)
            both[number >= 3].step()
        session.synchronize()
        return weights(model)

    assert_same(run_ranks(2, body), trained(optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1), steps=3))


def test_more_than_the_memory_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 300_000)
    words = r"staleness=30: up to 31 iterations .* 2 ranks of this machine = .* MB, and 0\.30 MB are free: lower it"
    with pytest.raises(UserError, match=words):
        trained(staleness=30)
    trained(staleness=1)


def test_buffered_bytes() -> None:
    """Two nodes, s = 1: 2 rounds wait, 4 turns."""
    layer = [Param("w", "", "Linear", (10, 20), "torch.float32", 4, "linear")]
    ps = build_book(layer, Topology.flat(2), kv_bytes=1 << 20, merge_bytes=0, schemes={})
    assert buffered(ps, 0, {}, 1) == (2 * 800, 0, 400 * (4 + 2))
    sfb = build_book(layer, Topology.flat(2), kv_bytes=1 << 20, merge_bytes=0, schemes={"w": "sfb"})
    assert buffered(sfb, 0, {"w": FactorSize(3, 4)}, 1) == (0, 4 * 360 + 2 * 720, 0)
