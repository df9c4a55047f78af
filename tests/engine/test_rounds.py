"""When gradients leave, and what else a round must get right: unused parameters, accumulation, odd models."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poseidon.api import Session
from poseidon.api.env import JobEnv
from poseidon.engine import start
from poseidon.errors import UserError
from poseidon.transport import Header, InprocEndpoint, Kind
from tests.engine.nets import Batch, Step, assert_equals_one_process, batch, build, clone, one_pass, sgd, share
from tests.ranks import checkpoint, run_ranks

COMMS = ["ps", "sfb", "hybrid", "block", "project_adam"]
GRADIENTS = {Kind.PUSH, Kind.FACTORS, Kind.DENSE}


class _Gate(torch.autograd.Function):
    """Identity whose backward waits until told that a gradient has left."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, left: threading.Event, seen: list[bool], patience: float) -> torch.Tensor:
        ctx.left, ctx.seen, ctx.patience = left, seen, patience
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        ctx.seen.append(ctx.left.wait(ctx.patience))
        return grad[0], None, None, None


class _Gated(nn.Module):
    def __init__(self, patience: float) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(64, 300), nn.Linear(300, 300)
        self.left, self.seen, self.patience = threading.Event(), [], patience

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(_Gate.apply(self.bottom(x), self.left, self.seen, self.patience))


def _gated_run(comm: str, overlap: str, patience: float) -> list[bool]:
    events: dict[int, threading.Event] = {}

    class Watched(InprocEndpoint):
        def send(self, peer: int, header: Header, payload: Any = None, **options: Any) -> None:
            if header.kind in GRADIENTS and self.rank in events:
                events[self.rank].set()
            super().send(peer, header, payload, **options)

    def body(session: Session) -> list[bool]:
        model = _Gated(patience)
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm, overlap=overlap)  # type: ignore[arg-type]
        events[session.rank] = model.left
        for step in range(3):
            model.left.clear()
            optimizer.zero_grad()
            model(batch(step, 4)[0]).sum().backward()
            optimizer.step()
        return model.seen

    return [seen for rank in run_ranks(2, body, kind=Watched) for seen in rank]


@pytest.mark.parametrize("comm", [comm for comm in COMMS if comm != "project_adam"])  # which tells only a layer's owner
def test_a_layers_gradient_leaves_while_the_layers_below_still_compute(comm: str) -> None:
    assert _gated_run(comm, "backward", 20.0) == [True] * 6


def test_without_overlap_nothing_leaves_during_backward() -> None:
    assert _gated_run("ps", "none", 0.2) == [False] * 6


class _Branches(nn.Module):
    """Rank 0 takes a, rank 1 takes b, nobody takes c; one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(64, 64)
        self.a, self.b, self.c = nn.Linear(64, 10), nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        out: torch.Tensor = getattr(self, head)(torch.relu(self.shared(torch.relu(self.shared(x)))))
        return out


@pytest.mark.parametrize("comm", COMMS)
def test_unused_parameters(comm: str) -> None:
    def step(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
        x, y = data
        heads = [model(x[:6], "a"), model(x[6:], "b")] if session is None else [model(x, "ab"[session.rank])]
        logits = torch.cat(heads)
        F.cross_entropy(logits, y).backward()

    torch.manual_seed(0)
    assert_equals_one_process(_Branches(), [6, 6], comm, step)


@pytest.mark.parametrize("comm", COMMS)
def test_a_rank_whose_loss_misses_the_model_hangs_nobody(comm: str) -> None:
    base = build("mlp")

    def body(session: Session) -> str:
        model = clone(base, session.rank)
        opt = sgd(model)
        session.distribute(model, opt, comm=comm)  # type: ignore[arg-type]
        for step in range(4):
            x, y = share(batch(step, 12), session.rank, [6, 6])
            opt.zero_grad()
            if session.rank == 0 or step % 2:
                F.cross_entropy(model(x), y).backward()
            opt.step()
        return session.digest(model)

    assert len(set(run_ranks(2, body))) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("comm", COMMS)
def test_accumulation(comm: str, set_to_none: bool) -> None:
    def step(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
        x, y = data
        if session is None:
            F.cross_entropy(model(x), y).backward()
            return
        with session.no_sync():
            (F.cross_entropy(model(x[:4]), y[:4]) / 2).backward()
        (F.cross_entropy(model(x[4:]), y[4:]) / 2).backward()

    assert_equals_one_process(build("lenet"), [8, 8], comm, step, set_to_none=set_to_none)


class _Checkpointed(nn.Module):
    def __init__(self, net: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, *rest = self.net.children()
        out: torch.Tensor = checkpoint(nn.Sequential(*rest), second(first(x)), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("comm", COMMS)
def test_activation_checkpoints(comm: str, reentrant: bool) -> None:
    assert_equals_one_process(_Checkpointed(build("lenet"), reentrant), [4, 6], comm, one_pass)


class _Odd(nn.Module):
    """channels_last and grouped convolution, a transposed one, 0-d and empty parameters, attention, N-D linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, groups=2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 10, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.up(self.conv(x.view(-1, 4, 4, 4)) * self.scale).flatten(2).transpose(1, 2)
        x, _ = self.attention(x, x, x)
        return {"logits": self.out(x).mean(1) + self.nothing.sum()}


@pytest.mark.parametrize("comm", COMMS)
def test_odd_shapes_layouts_and_outputs(comm: str) -> None:
    def step(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
        F.cross_entropy(model(data[0])["logits"], data[1]).backward()

    torch.manual_seed(0)
    assert_equals_one_process(_Odd(), [3, 4, 2], comm, step)


def test_different_models_give_the_same_error_everywhere() -> None:
    def body(session: Session) -> str:
        model = nn.Sequential(nn.Linear(4, 5 + session.rank))
        with pytest.raises(UserError) as caught:
            session.distribute(model, sgd(model))
        return str(caught.value)

    messages = set(run_ranks(3, body))
    assert len(messages) == 1
    (message,) = messages
    assert "0.weight" in message
    assert "[5, 4]" in message
    assert "[6, 4]" in message


def test_the_users_model_stays_the_users_model() -> None:
    base = build("mlp")

    def body(session: Session) -> None:
        model = clone(base, session.rank)
        opt = sgd(model)
        keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
        session.distribute(model, opt, comm="sfb")
        assert list(model.state_dict()) == keys
        x, y = batch(0, 6)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(m) for m in copied.modules()] == classes
            F.cross_entropy(copied(x), y).backward()  # a copy does not take part
            assert all(p.grad is not None for p in copied.parameters())
        assert repr(model) == repr(base)
        session.undistribute(model)
        assert [type(m) for m in model.modules()] == classes
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert all(p.grad is not None for p in model.parameters())

    run_ranks(2, body)


def test_a_world_of_one_installs_no_hook() -> None:
    model = build("mlp")
    optimizer = sgd(model)
    session = Session(JobEnv(), torch.device("cpu"), timeout=5)
    session.distribute(model, optimizer, comm="hybrid")
    assert not optimizer._optimizer_step_pre_hooks
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert type(module).__module__.startswith("torch.nn")
    for p in model.parameters():
        assert not p._backward_hooks
        assert not p._post_accumulate_grad_hooks
    session.rows(3)
    session.synchronize()
    assert session.gather("x") == ["x"]
    assert session.report(model)["bytes_sent_per_iteration"] == 0
    session.close()


def test_a_bare_linear_is_named_root_and_keeps_its_scheme() -> None:
    base = nn.Linear(64, 64)

    def body(session: Session) -> Any:
        model = clone(base, session.rank)
        opt = sgd(model)
        session.distribute(model, opt, comm="sfb")
        for step in range(2):
            model(batch(step, 4)[0]).sum().backward()
            opt.step()
        return session.report(model)["schemes"]

    assert run_ranks(2, body) == [{"(root)": "sfb"}] * 2


def _backward_twice(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
    out = model(data[0])
    F.cross_entropy(out, data[1]).backward(retain_graph=True)
    out.square().mean().backward()


def _backward_twice_said(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
    padding = torch.zeros(7, 64)  # the model is given more rows than the loss is a mean over
    n = len(data[0])
    if session is not None:
        session.rows(n)
    F.cross_entropy(model(torch.cat([data[0], padding]))[:n], data[1]).backward()
    model(torch.cat([data[0], padding]))[:n].square().mean().backward()


def _evaluates_with_grad(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
    if session is None or session.rank == 0:
        model(torch.randn(77, 64))
    F.cross_entropy(model(data[0]), data[1]).backward()


def _forward_raises(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
    with pytest.raises(RuntimeError):
        model(torch.zeros(50, 63))
    F.cross_entropy(model(data[0]), data[1]).backward()


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError("no")


def _backward_raises(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, session: Session | None) -> None:
    if session is None or session.rank == 0:
        handle = model[-1].register_forward_hook(lambda *args: _Raise.apply(args[-1]))  # type: ignore[index]
        out = model(data[0])
        handle.remove()
        with pytest.raises(ValueError, match="no"):
            out.sum().backward()
        opt.zero_grad()
    F.cross_entropy(model(data[0]), data[1]).backward()


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    "step",
    [_backward_twice, _backward_twice_said, _evaluates_with_grad, _forward_raises, _backward_raises],
)
def test_rows_are_those_of_the_backward_pass(comm: str, step: Step) -> None:
    assert_equals_one_process(build("mlp"), [3, 1, 6], comm, step)


def test_ranks_that_round_differently_are_named_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    threads = threading.local()
    monkeypatch.setattr(start, "_probe", lambda where: threads.probe)

    def body(session: Session) -> None:
        threads.probe = "other" if session.rank == 2 else "same"
        model = nn.Linear(4, 4)
        session.distribute(model, sgd(model))

    run_ranks(3, body)
    warnings = [record.getMessage() for record in caplog.records if "other bits" in record.getMessage()]
    assert len(warnings) == 1
    assert "ranks 2 compute" in warnings[0]
