"""What cannot equal one process by nature equals PyTorch's DDP: the mean of the ranks' local gradients.

docs/models.md names each, with its remedy.
"""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from tests.engine.nets import assert_exact, grads
from tests.matrix.harness import (
    COMMS,
    SIZES,
    Case,
    F,
    assert_equals_ddp,
    assert_equals_one_process,
    images,
    mean,
    mean_square,
    on_ranks,
    share,
    vectors,
)
from tests.ranks import run_ranks

#: Torch's generator, which dropout draws from, is one for all threads.
RANDOM = threading.Lock()


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def normed_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


def with_noise_of_its_own(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Dropout whose noise follows from the rows, so that rank and reference draw the same."""
    with RANDOM:
        torch.manual_seed(int(number.sum() * 1e6))
        loss = mean_square(model(*inputs), number)
    loss.backward()


def clamps_one_by_one(model: Any) -> Any:
    """Per-parameter clipping in hooks, before the ranks' gradients meet."""
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model[2].weight.register_hook(lambda grad: grad / grad.norm())
    model[4].bias.register_hook(torch.sign)
    return model


def of_the_norm(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """A loss of the whole batch."""
    model(*inputs).norm().backward()


def contrastive(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Every row is compared with all rows of its rank."""
    features = F.normalize(model(*inputs), dim=1)
    F.cross_entropy(features @ features.t(), torch.arange(len(features))).backward()


def summed(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """A sum over rows: DDP divides it by the ranks."""
    (model(*inputs).square().sum(1) * number).sum().backward()


def weight_penalty(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """The squared norm of the local gradient of the weights is a part of the loss."""
    loss = mean_square(model(*inputs), number)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()


def inner_steps(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Meta-learning: the loss after a step of each rank's own."""
    values = dict(model.named_parameters())
    loss = mean_square(torch.func.functional_call(model, values, inputs), number)
    steps = torch.autograd.grad(loss, list(values.values()), create_graph=True)
    moved = {name: p - 0.1 * step for (name, p), step in zip(values.items(), steps, strict=True)}
    mean_square(torch.func.functional_call(model, moved, inputs), number).backward()


CASES = {
    "batch norm": Case(lambda: mlp(nn.BatchNorm1d(8)), vectors(6)),
    "batch norm of images": Case(normed_images, images(3, 6, 6)),
    "dropout": Case(lambda: mlp(nn.Dropout(0.5)), vectors(6), step=with_noise_of_its_own),
    "hooks that are not linear": Case(mlp, vectors(6), after=clamps_one_by_one),
    "loss of the whole batch": Case(mlp, vectors(6), step=of_the_norm),
    "contrastive loss": Case(mlp, vectors(6), step=contrastive),
    "sum over rows": Case(mlp, vectors(6), step=summed),
    "penalty on the weights' gradient": Case(mlp, vectors(6), step=weight_penalty),
    "inner steps": Case(mlp, vectors(6), step=inner_steps),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_equals_ddp(name: str, sizes: list[int], comm: str) -> None:
    assert_equals_ddp(CASES[name], comm, sizes)


# --- remedies ----------------------------------------------------------------------------------------------------


def sum_times_ranks(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """With rows="equal", which divides by the ranks."""
    loss = (model(*inputs).square().sum(1) * number).sum()
    (loss * (1 if session is None else session.world_size)).backward()


def over_tokens(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """A mean over the positions that are no padding, of which every row has another number."""
    x = inputs[0]
    there = torch.arange(x.shape[1]) < (number * 3).int()[:, None]
    if session is not None:
        session.rows(int(there.sum()))
    model(x)[there].square().mean().backward()


def clips_afterwards(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    mean_square(model(*inputs), number).backward()
    for p in model.parameters():
        p.grad.div_(p.grad.norm())


def penalty_by_a_second_pass(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """grad(|g|^2 / 2) = H g, as the difference of the global gradients at two places."""
    parameters = list(model.parameters())

    def gradient() -> list[torch.Tensor]:
        optimizer.zero_grad()
        mean_square(model(*inputs), number).backward()
        return [p.grad.clone() for p in parameters]

    here = gradient()
    with torch.no_grad():
        torch._foreach_add_(parameters, here, alpha=0.1)
        there = gradient_with_grad(gradient)
        torch._foreach_sub_(parameters, here, alpha=0.1)
    for p, a, b in zip(parameters, here, there, strict=True):
        p.grad = a + 0.3 * (b - a) / 0.1


gradient_with_grad = torch.enable_grad()(lambda gradient: gradient())


REMEDIES = {
    "sum over rows, times ranks": Case(mlp, vectors(6), step=sum_times_ranks, options={"rows": "equal"}),
    "mean over unpadded tokens": Case(mlp, images(4, 6), step=over_tokens),
    "clipping after backward": Case(mlp, vectors(6), step=clips_afterwards),
    "penalty by a second pass": Case(mlp, vectors(6), step=penalty_by_a_second_pass),
    "group norm": Case(lambda: mlp(nn.GroupNorm(2, 8)), vectors(6)),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", REMEDIES)
def test_the_remedy_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    assert_equals_one_process(REMEDIES[name], comm, sizes)


# --- accumulation and autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "every pass synchronised"])
@pytest.mark.parametrize("comm", COMMS)
def test_uneven_shares_under_accumulation_follow_the_formula(comm: str, no_sync: bool) -> None:
    """Sum over r of (n_r / N) g_r, with n_r the rows of all of rank r's micro-batches and g_r what it accumulated."""
    torch.manual_seed(0)
    base = mlp()
    shares = [[(0, 4), (4, 5)], [(5, 7), (7, 13)]]  # of 13 rows: rank, micro-batch
    x = torch.randn(13, 6, generator=torch.Generator().manual_seed(1))

    def micro(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        first, last = shares[rank][number]
        return model(x[first:last]).square().mean() * (last - first) / total(rank)

    def total(rank: int) -> int:
        return shares[rank][1][1] - shares[rank][0][0]

    def body(session: Session) -> Any:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        for _ in range(2):
            optimizer.zero_grad()
            session.rows(total(session.rank))
            with session.no_sync() if no_sync else nullcontext():
                micro(model, session.rank, 0).backward()
            if not no_sync:
                session.rows(total(session.rank))
            micro(model, session.rank, 1).backward()
        return grads(model)

    local = []
    for rank in range(2):
        model = copy.deepcopy(base)
        micro(model, rank, 0).backward()
        micro(model, rank, 1).backward()
        local.append([grad * total(rank) / 13 for grad in grads(model) if grad is not None])
    want: list[torch.Tensor | None] = [a + b for a, b in zip(*local, strict=True)]
    for got in run_ranks(2, body):
        assert_exact(got, want)


@pytest.mark.parametrize("comm", COMMS)
def test_autocast(comm: str) -> None:
    """The mean of local bf16 products, within bf16's rounding; replicas equal bit for bit."""

    def step(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(*inputs)
        mean_square(out.float(), number).backward()

    torch.manual_seed(0)
    case = Case(lambda: nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4)), vectors(6), step=step, steps=2)
    base = case.model()
    sizes = [4, 4]
    local = []
    for rank in range(2):
        model = copy.deepcopy(base)
        step(model, None, *share(case.data(0, 8), rank, sizes), None)
        local.append(grads(model))
    want = [mean(pair) for pair in zip(*local, strict=True)]
    for seen, _ in on_ranks(case, base, comm, sizes):
        for got, expected in zip(seen[0], want, strict=True):
            assert got.dtype == torch.float32
            assert float((got - expected).abs().max()) <= 2**-7 * float(expected.abs().max())
