"""What the ranks of test_fsdp.py do: trainings under comm=fsdp beside one process (batch-norm: beside DDP)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from poseidon.api import Session
from poseidon.models.transformer import TransformerLM
from tests.engine.nets import assert_exact, batchnorm, lenet, mlp

Make = Callable[[], nn.Module]
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor, "Session | None"], None]
ROWS = 12


class LanguageModel(nn.Module):
    """Tied: the table of tokens is the head's weight, too, so that both belong to the root's unit."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.lm = TransformerLM(
            vocabulary=30, positions=8, width=24, layers=2, heads=2, mlp_ratio=2, dropout=0.0, tied=tied
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.lm((x[:, :8].abs() * 9).long().clamp(max=29)).mean(1)[:, :10]


class Encoder(nn.Module):
    """Attention reads its parts' weights, without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.end = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.layers(self.start(x.view(-1, 8, 8))).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.end = nn.LSTM(8, 31, 2, batch_first=True), nn.Linear(31, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.lstm(x.view(-1, 8, 8))[0][:, -1])


class Odd(nn.Module):
    """Called twice, checkpointed, only read, frozen, re-parametrised, never used; and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.twice, self.read, self.unused = (nn.Linear(64, 64) for _ in range(3))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.one, self.end = nn.Linear(64, 1), nn.Linear(64, 10)
        self.own = nn.Parameter(torch.randn(64, 64) / 8)
        self.several = nn.ParameterList([torch.randn(64, 64) / 8])

    def forward(self, x: torch.Tensor) -> Any:
        x = F.relu(self.twice(F.relu(self.twice(self.start(x)))))
        x = checkpoint(self.frozen, x, use_reentrant=False) @ self.own @ self.several[0]
        x = F.linear(x, self.read.weight, self.read.bias)
        return self.end(x * self.one(x).sigmoid())


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, session: Session | None) -> None:
    F.cross_entropy(model(x), y).backward()


def accumulated(model: nn.Module, x: torch.Tensor, y: torch.Tensor, session: Session | None) -> None:
    half = len(x) // 2
    with session.no_sync() if session else contextlib.nullcontext():
        (F.cross_entropy(model(x[:half]), y[:half]) / 2).backward()
    (F.cross_entropy(model(x[half:]), y[half:]) / 2).backward()


def twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor, session: Session | None) -> None:
    """Backward passes, each with traffic, that add up; then two forward passes for one."""
    F.cross_entropy(model(x), y).backward()
    (F.cross_entropy(model(-x), y) + F.cross_entropy(model(2 * x), y)).backward()


def clipped(model: nn.Module, x: torch.Tensor, y: torch.Tensor, session: Session | None) -> None:
    loss = F.cross_entropy(model(x), y)
    penalty = 1e-3 * sum(p.square().sum() for p in model.parameters())  # after the forward pass they are whole
    (loss + penalty).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def looked_at(model: nn.Module, x: torch.Tensor, y: torch.Tensor, session: Session | None) -> None:
    """Rank 0 alone evaluates and saves, between a backward pass and its step, and before the next one."""
    for _ in range(2):
        if session is not None:
            session.synchronize()
        if session is None or session.rank == 0:
            model.eval()
            with torch.inference_mode():
                model(x)
            _ = {name: value.numpy() for name, value in model.state_dict().items()}
            model.train()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()


def fails_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor, session: Session | None) -> None:
    """On all ranks, halfway through the layers; the script catches it and goes on."""
    for context in (torch.enable_grad(), torch.no_grad()):
        with contextlib.suppress(ZeroDivisionError), context:
            handle = list(model.children())[-1].register_forward_pre_hook(lambda *_: 1 // 0)
            try:
                model(x)
            finally:
                handle.remove()
    F.cross_entropy(model(x), y).backward()


@dataclass(frozen=True)
class Case:
    make: Make
    step: Step = plain
    adam: bool = False
    beside: str = "single"  # or "ddp"
    dtype: torch.dtype = torch.float32

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(model.parameters(), lr=1e-3)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


CASES = {
    "mlp": Case(mlp),
    "mlp, adam": Case(mlp, adam=True, dtype=torch.float64),  # Adam makes rounding large where a gradient is 0
    "mlp, fp64": Case(mlp, dtype=torch.float64),
    "mlp, accumulated": Case(mlp, accumulated),
    "mlp, forward fails": Case(mlp, fails_first),
    "lenet": Case(lenet),
    "lenet, several passes": Case(lenet, twice),
    "batch-norm": Case(batchnorm, beside="ddp"),
    "transformer_lm": Case(LanguageModel),
    "transformer_lm, untied": Case(lambda: LanguageModel(tied=False), clipped),
    "encoder": Case(Encoder, looked_at),
    "lstm": Case(Recurrent, accumulated),
    "odd": Case(Odd),
    "odd, looked at": Case(Odd, looked_at, adam=True, dtype=torch.float64),
}


def built(case: Case, rank: int = 0) -> nn.Module:
    """Wrong on all ranks but 0, whose values must win."""
    torch.manual_seed(0)
    model = case.make().to(case.dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    return model


def train(case: Case, model: nn.Module, session: Session | None, of: Any = None) -> list[Any]:
    """Three steps; the gradients of each.

    Args:
        of: gives the model's gradients.
    """
    optimizer, seen = case.optimizer(model), []
    if session is not None:
        session.distribute(model, optimizer, comm="fsdp" if of else "ddp", merge_bytes=1024)
    parts = list(model.parameters())
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, 64, generator=generator, dtype=case.dtype)
        y = torch.randint(0, 10, (ROWS,), generator=generator)
        if session is not None:  # of each half of the rows this rank's share, so that micro-batches are halves too
            x, y = (t.unflatten(0, (2, session.world_size, -1))[:, session.rank].flatten(0, 1) for t in (x, y))
        optimizer.zero_grad()
        case.step(model, x, y, session)
        seen.append([of(p.grad) if of and p.grad is not None else _copy(p.grad) for p in parts])
        optimizer.step()
    return [seen, optimizer]


def _copy(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.clone()


def check(case: Case, session: Session) -> None:
    reference = built(case)
    beside = session if case.beside == "ddp" else None
    want, its_optimizer = train(case, reference, beside)
    if beside is not None:
        session.synchronize()
        session.undistribute(reference)
    model = built(case, session.rank)
    before, parameters = _traces(model), list(model.parameters())
    got, optimizer = train(case, model, session, of=lambda grad: grad.full_tensor())
    for a, b in zip(got, want, strict=True):
        assert_exact(a, b)
    session.check(model)
    session.synchronize()
    _close(model.state_dict(), reference.state_dict())
    _close(optimizer.state_dict()["state"], its_optimizer.state_dict()["state"])
    assert len(set(session.gather(session.digest(model)))) == 1
    session.undistribute(model)
    _close(model.state_dict(), reference.state_dict())
    _close(optimizer.state_dict()["state"], its_optimizer.state_dict()["state"])
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert _traces(model) == before


def _traces(model: nn.Module) -> list[Any]:
    return [(type(m), set(vars(m)), [len(v) for k, v in vars(m).items() if "hooks" in k]) for m in model.modules()]


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(dict(got), dict(want), rtol=1e-4, atol=1e-5)


def check_all(session: Session) -> None:
    for name, case in CASES.items():
        try:
            check(case, session)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    if session.rank == 0:
        print("SAME", len(CASES), flush=True)
