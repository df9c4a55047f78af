"""overlap=full: whoever looks at a weight finds what overlap=none would have left there, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from poseidon.api import Session
from poseidon.engine import Engine
from poseidon.engine.lazy import Lazy
from poseidon.errors import OutOfStepError, PeerLostError
from poseidon.transport import Header, InprocEndpoint
from tests.copies import LateCopies
from tests.matrix import test_layers, test_optimizers, test_structure, test_techniques
from tests.matrix.harness import Case, build, images, share, tokens, vectors
from tests.ranks import run_ranks

ALL = ["ps", "sfb", "hybrid", "block", "project_adam"]
SIZES = [3, 2]
Tensors = list[torch.Tensor]


class Slow(InprocEndpoint):
    """Sends late, and reads what it sends only then, as a socket that copies nothing does."""

    def __init__(self, rank: int, peers: list[InprocEndpoint]) -> None:
        super().__init__(rank, peers)
        self._chance, self._queue = random.Random(rank), SimpleQueue[Any]()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def send(self, peer: int, header: Header, payload: Any = None, **how: Any) -> None:
        self._queue.put(partial(super().send, peer, header, payload, **how))

    def _work(self) -> None:
        pause = threading.Event()
        while (call := self._queue.get()) is not None:
            if self._chance.random() < 0.1:
                pause.wait(self._chance.random() * 0.004)
            call()

    def close(self, timeout: float) -> None:
        super().close(timeout)  # its last messages are in the queue then
        self._queue.put(None)
        self._worker.join(timeout)


def engine_of(session: Session) -> Engine:
    (engine,) = session._engines()
    return engine


def lazy_of(session: Session) -> Lazy:
    lazy = engine_of(session)._lazy
    assert lazy is not None
    return lazy


def waiting(session: Session) -> int:
    """Parameters whose step was put off."""
    round_ = lazy_of(session)._round
    return 0 if round_ is None else len(round_.waiting)


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Tensors:
    found = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    for state in optimizer.state_dict()["state"].values() if optimizer is not None else ():
        found += [value.detach().clone() for value in state.values() if isinstance(value, torch.Tensor)]
    return found


Seen = tuple[Tensors, list[int]]


def train(
    case: Case,
    comm: str,
    overlap: str,
    sizes: Sequence[int] = SIZES,
    between: Callable[[Session, nn.Module, Any, int], None] = lambda *_: None,
    zero: str = "before",
    schedule: bool = True,
    **ranks: Any,
) -> list[Seen]:
    """Of each rank, what it has in the end, and by step how many parameters' updates were put off."""
    base = build(case)

    def body(session: Session) -> Seen:
        model = copy.deepcopy(base)
        optimizer = case.optimizer(model)
        rates = ExponentialLR(optimizer, 0.8)
        session.distribute(model, optimizer, comm=comm, **{"overlap": overlap, **case.options})  # type: ignore[arg-type]
        trained, put_off = case.after(model), []
        for step in range(case.steps):
            inputs, number = share(case.data(step, sum(sizes)), session.rank, list(sizes))
            if zero == "before":
                optimizer.zero_grad()
            case.take(trained, optimizer, inputs, number, session)
            optimizer.step()
            if zero == "after":
                optimizer.zero_grad()
            elif zero == "model":
                model.zero_grad()
            elif zero == "in place":
                optimizer.zero_grad(set_to_none=False)
            put_off.append(waiting(session) if overlap == "full" else 0)
            if schedule:
                rates.step()
            between(session, model, optimizer, step)
        session.synchronize()
        return values(model, optimizer), put_off

    return run_ranks(len(sizes), body, **ranks)


def assert_same(got: list[Seen], want: list[Seen]) -> None:
    for (mine, _), (others, _) in zip(got, want, strict=True):
        assert len(mine) == len(others)
        for one, other in zip(mine, others, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


def both(case: Case, comm: str, **options: Any) -> list[int]:
    """Trains with overlap=none and full; returns what rank 0 put off, by step."""
    got = train(case, comm, "full", **options)
    assert_same(got, train(case, comm, "none", **options))
    return got[0][1]


def mlp(steps: int = 5, **options: Any) -> Case:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.BatchNorm1d(50), nn.Linear(50, 3))

    return Case(model, vectors(40), steps=steps, options=options)


def words() -> Case:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(32, 20), nn.Tanh(), nn.Linear(20, 2))

    return Case(model, tokens(30, 4), steps=5)


def convolutions() -> Case:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    return Case(model, images(2, 6, 6), steps=5)


SHAPES: dict[str, dict[str, Any]] = {
    "flat": {"sizes": [3, 2, 4]},
    "devices": {"sizes": [3, 2, 4, 2], "devices": [2, 2]},
    "servers": {"sizes": [3, 2], "servers": 1},
    "copies": {"sizes": [3, 2], "copies": LateCopies},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("comm", ALL)
def test_late_messages_change_nothing(comm: str, shape: str) -> None:
    for case in (mlp(merge_bytes=0), words()):
        put_off = both(case, comm, kind=Slow, **SHAPES[shape])
        assert put_off[:2] == [0, 0]  # iterations 0 and 1 find out rows, and what forward passes look at
        assert all(put_off[2:])


MODELS = {
    f"{module.__name__.rpartition('.')[2]}: {name}": case
    for module in (test_layers, test_structure, test_techniques)
    for name, case in module.CASES.items()
    if name != "torch.func of the model"  # levels of forward mode are all threads', so what is recorded here varies
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_and_technique(name: str) -> None:
    both(MODELS[name], "hybrid", schedule=False)


#: One of each class, as it is by default; the rest is slow.
PLAIN = {name for name in test_optimizers.CASES if name.endswith("plain") or "," not in name or " for " in name}


@pytest.mark.parametrize(
    "name", [name if name in PLAIN else pytest.param(name, marks=pytest.mark.slow) for name in test_optimizers.CASES]
)
def test_every_optimizer(name: str) -> None:
    case = test_optimizers.CASES[name]
    torch.manual_seed(0)
    base = test_optimizers.Net()

    def run(overlap: str) -> list[Seen]:
        mean = test_optimizers.Mean()

        def body(session: Session) -> Seen:
            net = copy.deepcopy(base)
            optimizers = case.make(net)
            session.distribute(net, optimizers, comm="hybrid", overlap=overlap)  # type: ignore[arg-type]
            schedule = case.schedule(optimizers[0]) if case.schedule is not None else None
            put_off = []

            def closure(step: int) -> torch.Tensor:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = test_optimizers.loss_of(net, step, session.rank)
                loss.backward()
                return mean(loss, session.rank)

            for step in range(test_optimizers.STEPS):
                loss = None if case.closure else closure(step)
                for optimizer in optimizers:
                    optimizer.step(*[partial(closure, step)] if case.closure else [])  # type: ignore[arg-type]
                put_off.append(waiting(session) if overlap == "full" else 0)
                if schedule is not None:
                    schedule.step(*[float(loss)] if "by the loss" in name and loss is not None else [])
            session.synchronize()
            state = [t for optimizer in optimizers for t in values(nn.Module(), optimizer)]
            return values(net) + state, put_off

        return run_ranks(2, body)

    got = run("full")
    assert_same(got, run("none"))
    assert all(got[0][1][2:]) != case.closure


@pytest.mark.parametrize("zero", ["before", "after", "model", "in place", "never"])
def test_gradients_are_zeroed_wherever(zero: str, caplog: pytest.LogCaptureFixture) -> None:
    put_off = both(mlp(), "hybrid", zero=zero, kind=Slow)
    assert all(put_off[2:]) == (zero in ("before", "after", "model"))
    assert ("falls back to overlap=backward" in caplog.text) == (zero in ("in place", "never"))


def evaluated(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    if step % 2:
        model.eval()
        with torch.no_grad():
            assert model(torch.ones(2, 40)).isfinite().all()
        model.train()


def by_one_rank(everyone: threading.Barrier, session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    """The others are in a barrier meanwhile."""
    if session.rank == 0:
        evaluated(session, model, optimizer, 1)
    everyone.wait(30)


def saved(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert engine_of(session)._lazy is None or not waiting(session)
    if step == 2:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])


def copied(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    other = copy.deepcopy(model)
    assert all(type(module._parameters) is dict for module in other.modules())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def duplicated(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    """Copies of the optimizer have what it has once nothing waits any more."""
    others = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    session.synchronize()
    mine = optimizer.state_dict()["state"]
    for other in others:
        assert "__reduce_ex__" not in vars(other)
        torch.testing.assert_close(other.state_dict()["state"], mine, rtol=0, atol=0)
        pairs = zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


def averaged(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    """Weights are changed through the module: what was put off comes first."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def rewritten(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        model[0].weight.data = model[0].weight.data.clone()
    if step == 2:
        model[0].bias = nn.Parameter(model[0].bias.detach() * 2)
        optimizer.add_param_group({"params": [model[0].bias], "lr": 0.2})


def frozen(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    model[1 + step % 2 * 2].requires_grad_(step % 2 == 1)
    model[0].weight.requires_grad_(step % 2 == 0)


def digested(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    session.digest(model)
    assert engine_of(session)._lazy is None or not waiting(session)


def logged(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    """Gradients are looked at after the step."""
    assert all(float(p.grad.norm()) > 0 for p in model.parameters())


def stopped(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    """Distributed anew."""
    if step == 3:
        session.undistribute(model)
        assert all(type(module._parameters) is dict for module in model.modules())
        session.distribute(model, optimizer, comm="ps", overlap="full")


BETWEEN = [evaluated, saved, copied, duplicated, averaged, rewritten, frozen, digested, logged]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda call: call.__name__)
@pytest.mark.parametrize("shape", ["flat", "devices"])
def test_what_happens_between_iterations(between: Any, shape: str) -> None:
    put_off = both(mlp(6), "sfb", between=between, kind=Slow, **SHAPES[shape])
    assert put_off[2] or put_off[3]


@pytest.mark.parametrize("shape", ["flat", "devices"])
def test_one_rank_evaluates_while_the_others_wait_elsewhere(shape: str) -> None:
    everyone = threading.Barrier(len(SHAPES[shape]["sizes"]))
    both(mlp(), "sfb", between=partial(by_one_rank, everyone), **SHAPES[shape])


def test_undistributed_on_the_way() -> None:
    put_off = both(mlp(7), "sfb", between=stopped)
    assert put_off[2]
    assert put_off[4:6] == [0, 0]


def of_a_list() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(40, 20), nn.Linear(20, 3)
            self.kept = [self.last.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.first(x), self.kept[0])

    return Net()


def test_weights_that_a_forward_pass_finds_elsewhere() -> None:
    assert all(both(Case(of_a_list, vectors(40), steps=5), "hybrid", kind=Slow)[2:])


def by_turns(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """A layer is used every other time, and then in the second micro-batch alone."""
    turn = model.turn = getattr(model, "turn", -1) + 1
    halves = [t.chunk(2) for t in inputs]
    for part in range(2):
        hidden = model[0](halves[0][part])
        out = model[2](hidden) if part and turn % 2 else hidden
        with session.no_sync() if session is not None and not part else torch.enable_grad():
            out.square().mean().backward()


def test_layers_that_not_every_step_uses() -> None:
    both(Case(mlp().model, vectors(40), step=by_turns, steps=6), "hybrid", kind=Slow, sizes=[4, 6])


class Objection(torch.optim.SGD):
    """May do anything."""


def clipping(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    model(*inputs).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01


def clipping_itself(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    model(*inputs).square().mean().backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-1e-3, 1e-3)


def scaling(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(*inputs).square().mean()).backward()
    scaler.unscale_(optimizer)


def assigning(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    model(*inputs).square().mean().backward()
    model[0].bias.grad = torch.ones_like(model[0].bias)
    model[2].bias.grad = None


def again(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    for _ in range(2):
        model(*inputs).square().mean().backward()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def with_hooks(model: Any) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(
        lambda *_: [p.grad.clamp_(-1e-3, 1e-3) for p in model.parameters() if p.grad is not None] and None
    )
    return optimizer


REASONS = {
    "clip_grad_norm_": (clipping, sgd, "looked at"),
    "clipped by hand": (clipping_itself, sgd, "looked at"),
    "GradScaler": (scaling, sgd, "looked at"),
    "assigned": (assigning, sgd, "assigned"),
    "backward twice": (again, sgd, "several backward passes"),
    "hooks": (None, with_hooks, "hooks"),
    "a class of the user's": (None, lambda model: Objection(model.parameters(), lr=0.1), "Objection"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_wait_is_waited_for_and_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, optimizer, word = REASONS[name]
    case = Case(mlp().model, vectors(40), step=step, optimizer=optimizer, steps=5)
    assert not any(both(case, "hybrid", kind=Slow))
    said = [record.getMessage() for record in caplog.records if "falls back" in record.getMessage()]
    assert len(said) == 1
    assert word in said[0]


class Mine(torch.optim.SGD):
    by_parameter = True


def test_an_optimizer_of_the_users_says_that_it_steps_each_parameter_by_itself() -> None:
    case = Case(mlp().model, vectors(40), optimizer=lambda model: Mine(model.parameters(), lr=0.1), steps=5)
    assert all(both(case, "hybrid")[2:])


def test_with_staleness_there_is_nothing_to_hide_under() -> None:
    def body(session: Session) -> bool:
        model = mlp().model()
        session.distribute(model, sgd(model), comm="ps", overlap="full", staleness=1)
        return engine_of(session)._lazy is None

    assert run_ranks(2, body) == [True, True]


def test_two_models_that_train_against_each_other() -> None:
    torch.manual_seed(0)
    bases = nn.Linear(6, 40), nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))

    def run(overlap: str) -> list[Seen]:
        def body(session: Session) -> Seen:
            maker, judge = copy.deepcopy(bases)
            optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (maker, judge)]
            for model, optimizer in zip((maker, judge), optimizers, strict=True):
                session.distribute(model, optimizer, comm="hybrid", overlap=overlap)  # type: ignore[arg-type]
            chance = torch.Generator().manual_seed(session.rank)
            for _ in range(6):
                made = maker(torch.randn(3, 6, generator=chance))
                optimizers[1].zero_grad()
                (judge(made.detach()).mean() - judge(torch.randn(3, 40, generator=chance)).mean()).backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                judge(made).mean().neg().backward()
                optimizers[0].step()
            session.synchronize()
            return values(maker, optimizers[0]) + values(judge, optimizers[1]), []

        return run_ranks(2, body, kind=Slow)

    assert_same(run("full"), run("none"))


def without_rows(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Every rank in turn has none."""
    turn = model.turn = getattr(model, "turn", -1) + 1
    if session is not None and turn % session.world_size == session.rank:
        session.rows(0)
    else:
        model(*inputs).square().mean().backward()


def test_ranks_without_rows() -> None:
    put_off = both(Case(mlp().model, vectors(40), step=without_rows, steps=7), "hybrid", kind=Slow)
    assert any(put_off)


def test_a_backward_pass_that_fails_before_anything_has_left() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ValueError("a bad batch")

    def step(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
        with pytest.raises(ValueError, match="a bad batch"):
            Fails.apply(model(*inputs)).sum().backward()
        model(*inputs).square().mean().backward()

    assert all(both(Case(mlp().model, vectors(40), step=step, steps=5), "hybrid", kind=Slow)[2:])


def test_ranks_that_join() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))

    def run(overlap: str) -> list[Seen]:
        def body(session: Session) -> Seen:
            model = copy.deepcopy(base)
            optimizer = sgd(model)
            session.distribute(model, optimizer, comm="hybrid", overlap=overlap)  # type: ignore[arg-type]
            with session.join():
                for step in range(4 + 2 * session.rank):
                    optimizer.zero_grad()
                    model(torch.full((2, 6), step + 1.0)).square().mean().backward()
                    optimizer.step()
            session.synchronize()
            return values(model, optimizer), []

        return run_ranks(3, body, kind=Slow)

    assert_same(run("full"), run("none"))


def test_ranks_out_of_step_are_named() -> None:
    def body(session: Session) -> str:
        model = mlp().model()
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm="hybrid", overlap="full")

        def train() -> None:
            for step in range(8):
                model(torch.ones(2, 40)).square().mean().backward()
                if step != 4 or session.rank:
                    optimizer.step()
                    optimizer.zero_grad()

        with pytest.raises(OutOfStepError) as raised:
            train()
        return str(raised.value)

    for said in run_ranks(2, body):
        assert "rank 0 has made 4" in said or "rank 0 4 before" in said


def test_who_is_waited_for_in_a_forward_pass_is_named(caplog: pytest.LogCaptureFixture) -> None:
    left = threading.Event()

    def body(session: Session) -> bool:
        model = mlp().model()
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm="ps", overlap="full")

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(2, 40)).square().mean().backward()
                optimizer.step()

        train(4)
        if session.rank == 1:
            return left.wait(20)
        with pytest.raises(PeerLostError, match=r"rank 1: p.* iteration 4"):
            train(2)
        left.set()
        return bool(model.state_dict()) and "between two iterations" in caplog.text

    with contextlib.suppress(PeerLostError):
        assert all(run_ranks(2, body, timeout=1.0))
    assert left.is_set()


def test_gradients_are_those_of_the_step_whenever_they_are_looked_at() -> None:
    def body(session: Session) -> bool:
        model = nn.Linear(30, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.distribute(model, optimizer, comm="ps", overlap="full")
        same, kept = [], None
        for step in range(5):
            optimizer.zero_grad()
            model(torch.full((2, 30), session.rank + 1.0)).sum().backward()
            before, kept = kept, model.weight.grad
            if step == 3:
                same.append(torch.equal(kept, torch.full((4, 30), 3.0)))
            optimizer.step()
            if before is not None:
                same.append(torch.equal(before, torch.full((4, 30), 3.0)))
        same.append(torch.equal(model.weight.grad, torch.full((4, 30), 3.0)))
        return all(same) and type(model.weight.grad) is torch.Tensor

    assert all(run_ranks(2, body, kind=Slow))
