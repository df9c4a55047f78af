"""A model that changes after it was distributed: frozen, unfrozen, replaced parameters; again and again."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import weight_norm as weight_norm_by_hooks

from poseidon.api import Session
from poseidon.errors import OutOfStepError, UserError
from tests.engine.nets import assert_exact, grads
from tests.matrix.harness import COMMS, SIZES, mean_square, vectors
from tests.ranks import run_ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4))


def unfreeze(model: nn.Module) -> None:
    model.requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model[2].requires_grad_(False)  # type: ignore[index]
    model[2].zero_grad()  # type: ignore[index]


def assign(model: nn.Module) -> None:
    """Other weights on every rank: rank 0's count."""
    state = {name: tensor + torch.rand(()) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_layer(model: nn.Module) -> None:
    model[4] = nn.Linear(30, 4)  # type: ignore[operator]


def move(model: nn.Module) -> None:
    """In place: nothing is replaced."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    model.load_state_dict(model.state_dict())


def double(model: nn.Module) -> None:
    model.double()


def grow(model: nn.Module) -> None:
    """As a head gets classes."""
    for p in model[4].parameters():  # type: ignore[index]
        p.data, p.grad = torch.cat([p.data, p.data[:2] + 1]), None


def transpose(model: nn.Module) -> None:
    """In memory only."""
    weight = model[2].weight  # type: ignore[index]
    weight.data, weight.grad = weight.data.t().contiguous().t(), None


def weight_norm(model: nn.Module) -> None:
    parametrizations.weight_norm(model[2])  # type: ignore[index]


def old_weight_norm(model: nn.Module) -> None:
    weight_norm_by_hooks(model[2])  # type: ignore[index]


def orthogonal(model: nn.Module) -> None:
    parametrizations.orthogonal(model[2], use_trivialization=False)  # type: ignore[index]


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model[2], "weight", amount=0.3)  # type: ignore[index]


#: Of these the parameters are the same objects as before.
KEEPING = {"unfreeze": unfreeze, "freeze": freeze, "move": move, "orthogonal": orthogonal, "prune": pruned}
CHANGES = {
    **KEEPING,
    "assign": assign,
    "replace a layer": replace_layer,
    "double": double,
    "grow": grow,
    "transpose": transpose,
    "weight norm": weight_norm,
    "old weight norm": old_weight_norm,
}
#: Those that take a new agreement.
NEW = [name for name in CHANGES if name not in ("freeze", "move")]


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CHANGES)
def test_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    compare(name, sizes, comm)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("idle", [0, 1], ids=["rank 0", "rank 1"])
@pytest.mark.parametrize("name", NEW)
def test_a_rank_without_rows_then_notices_it_too(name: str, idle: int, comm: str) -> None:
    """It leaves out forward and backward."""
    compare(name, SIZES[0], comm, idle=idle)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("name", NEW)
def test_a_model_that_is_called_by_another_method(name: str, comm: str) -> None:
    compare(name, SIZES[0], comm, root=False)


def compare(name: str, sizes: list[int], comm: str, *, idle: int | None = None, root: bool = True) -> None:
    """Against one process, with a change at step 3, when rank `idle` has no rows."""
    torch.manual_seed(0)
    base = net()
    if name == "unfreeze":
        base[:4].requires_grad_(False)  # type: ignore[index]
    data = [vectors(6)(torch.Generator().manual_seed(step), sum(sizes))[0] for step in range(6)]
    states: dict[int, dict[str, torch.Tensor]] = {}

    def rows(step: int, rank: int | None) -> torch.Tensor:
        first = sum(sizes[:rank])
        if rank is None or (step == 3 and idle not in (None, rank)):
            return data[step]
        return data[step][first : first + (0 if step == 3 and idle == rank else sizes[rank])]

    def train(model: Any, session: Session | None) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if session is not None:
            session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        rank = None if session is None else session.rank
        seen = []
        for step in range(len(data)):
            if step == 3:
                CHANGES[name](model)
                if name not in KEEPING:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                if session is None:  # one process goes on with what rank 0 had
                    model.load_state_dict(states[0])
                else:
                    states[session.rank] = copy.deepcopy(model.state_dict())
            x = rows(step, rank).to(model[0].bias.dtype)
            optimizer.zero_grad()
            if session is not None and (not root or not len(x)):
                session.rows(len(x))
            if len(x):
                out = model(x) if root else model[2:](model[:2](x))
                mean_square(out, torch.ones(len(x))).backward()
                del out  # its graph would keep what autograd knows of the parameters as they are
            seen.append([grad for grad in grads(model) if grad is not None] if len(x) else None)
            optimizer.step()
        return seen

    def body(session: Session) -> tuple[list[Any], str]:
        torch.manual_seed(session.rank)
        model = copy.deepcopy(base)
        return train(model, session), session.digest(model)

    ranks = run_ranks(len(sizes), body)
    want = train(copy.deepcopy(base), None)
    for seen, _ in ranks:
        for got, expected in zip(seen, want, strict=True):
            if got is not None:
                assert_exact(got, expected)
    assert len({digest for _, digest in ranks}) == 1


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("others", ["train", "have no rows", "have left"])
def test_a_change_that_others_do_not_make_is_named_at_once(who: int, others: str) -> None:
    """Long before the time for silent ranks is up: they wait for each other."""

    def train(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with session.join() if others == "have left" else contextlib.nullcontext():
            for step in range(3):
                if step == 2 and session.rank == who:
                    unfreeze(model)
                elif step == 2 and others == "have left":
                    break
                elif step == 2 and others == "have no rows":
                    session.rows(0)
                    optimizer.step()
                    continue
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    def body(session: Session) -> str:
        model = net()
        model[:4].requires_grad_(False)  # type: ignore[index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer)
        started = time.monotonic()
        with pytest.raises(OutOfStepError) as raised:
            train(session, model, optimizer)
        assert time.monotonic() - started < 20
        return str(raised.value)

    said = set(run_ranks(2, body, timeout=50.0))
    assert len(said) == 1
    assert f"rank {who} had other parameters" in said.pop()


def test_all_is_frozen_first() -> None:
    base = net().requires_grad_(False)

    def body(session: Session) -> tuple[str, Any]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer, comm="sfb")
        model(torch.ones(2, 6))
        model.requires_grad_(True)
        for _ in range(2):
            model(torch.full((2, 6), session.rank + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return session.digest(model), session.report(model)["schemes"]

    first, second = run_ranks(2, body)
    assert first == second
    assert set(first[1].values()) == {"sfb"}


def test_a_change_on_one_rank_only_is_named() -> None:
    def body(session: Session) -> str:
        model = net()
        model[:4].requires_grad_(False)  # type: ignore[index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer)
        model[2].requires_grad_(True)  # type: ignore[index]
        if session.rank:
            model[0].requires_grad_(True)  # type: ignore[index]
        with pytest.raises(UserError) as raised:
            model(torch.ones(2, 6))
        return str(raised.value)

    said = set(run_ranks(3, body))
    assert len(said) == 1
    assert "ranks differ: parameter 0.weight" in said.pop()


@pytest.mark.parametrize("comm", COMMS)
def test_distribute_undistribute_distribute(comm: str) -> None:
    torch.manual_seed(0)
    base = net()

    def body(session: Session) -> str:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.full((2, 6), session.rank + 1.0)).square().mean().backward()
                optimizer.step()
            session.undistribute(model)
            assert type(model[0]) is nn.Linear  # type: ignore[index]
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        return session.digest(model)

    assert len(set(run_ranks(2, body))) == 1


TOOLS: dict[str, Any] = {
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight norm": weight_norm_by_hooks,
    "prune": lambda module: prune.l1_unstructured(module, "weight", amount=0.3),
    "identity": lambda module: parametrize.register_parametrization(module, "weight", nn.Identity()),
}


NO_COPIES = ("old weight norm", "prune")  # torch refuses


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("kind", ["linear", "embedding", "bag"])
def test_tools_that_make_another_class_of_a_layer(kind: str, name: str) -> None:
    """While it is distributed, and still when it is no longer."""
    layers: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
        "linear": (lambda: nn.Linear(6, 4), torch.randn(3, 6)),
        "embedding": (lambda: nn.Embedding(6, 4), torch.tensor([1, 5, 1])),
        "bag": (lambda: nn.EmbeddingBag(6, 4), torch.tensor([[1, 5], [1, 2]])),
    }
    make, x = layers[kind]
    torch.manual_seed(0)
    base = nn.Sequential(make(), nn.Linear(4, 3))

    def body(session: Session) -> tuple[str, Any]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer, comm="sfb")
        for step in range(4):
            if step == 2:
                TOOLS[name](model[0])
                for buffer in model.buffers() if name != "prune" else ():
                    buffer.add_(session.rank)  # as random ones are: rank 0's count
                if name not in NO_COPIES:
                    with torch.no_grad():
                        assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))
                    model.train()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        digest = session.digest(model)
        changed = type(model[0])
        session.undistribute(model)
        assert type(model[0]) is changed
        model.zero_grad()
        model(x).square().mean().backward()
        return digest, [p.grad is not None for p in model.parameters()]

    (first, there), (second, _) = run_ranks(2, body)
    assert first == second
    assert all(there)
