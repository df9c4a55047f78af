"""Models that sleep: names and sizes stay, the engine and DDP see what they would see, and time is the profile's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.config.density import FactorDensity
from poseidon.config.hardware import HardwareConfig, IterationConfig
from poseidon.emulation import accelerator as module
from poseidon.emulation.accelerator import Accelerator, Costs
from poseidon.emulation.layers import LayerTime, layer_times, trace
from poseidon.emulation.model import EmulatedOptimizer, emulate
from poseidon.engine.parameters import observe
from tests.ranks import run_ranks

ROWS, SECONDS = 4, 0.012
PROFILE = HardwareConfig(
    iterations={name: IterationConfig(batch_size=ROWS, seconds=SECONDS) for name in ("tied", "wide")}
)


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a layer called twice, a norm with buffers, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.twice = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.twice(self.twice(self.embed(x).mean(1)).relu()))
        logits: torch.Tensor = self.head(self.frozen(y)) * self.scale
        return logits


def wide() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 300), nn.ReLU(), nn.Linear(300, 200))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "tied": (Tied, lambda: torch.zeros(ROWS, 5, dtype=torch.long)),
    "wide": (wide, lambda: torch.zeros(ROWS, 2, 8)),
}


def parts(name: str, **rates: float) -> tuple[nn.Module, list[LayerTime], Accelerator]:
    make, rows = MODELS[name]
    with torch.device("meta"):
        model, x = make(), rows()
    calls = trace(copy.deepcopy(model), x)
    times, _ = layer_times(calls, PROFILE, name, ROWS)
    return model, times, Accelerator(times, Costs(0.001, **rates))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    model, times, accelerator = parts(name)
    real = MODELS[name][0]()
    assert emulate(model, times, accelerator) is model
    assert type(model) is type(real)
    assert {k: (v.shape, v.dtype, v.device) for k, v in model.state_dict().items()} == {
        k: (v.shape, v.dtype, v.device) for k, v in real.state_dict().items()
    }
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in real.parameters()]
    assert len({p.data_ptr() for p in model.parameters()}) == 1


@pytest.mark.parametrize("name", MODELS)
def test_an_iteration_gives_the_gradients_that_there_would_be_and_takes_its_time(name: str) -> None:
    model, times, accelerator = parts(name)
    real, x = MODELS[name][0](), MODELS[name][1]()
    real(x).sum().backward()
    optimizer = EmulatedOptimizer(emulate(model, times, accelerator).parameters(), accelerator)
    start = time.monotonic()
    model(torch.zeros(ROWS)).backward()
    optimizer.step()
    assert time.monotonic() - start >= SECONDS + 0.001 - 1e-4
    for (name, p), q in zip(model.named_parameters(), real.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or p.grad.shape == q.shape
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_without_grad_only_the_forward_pass_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, times, accelerator = parts("wide")
    emulate(model, times, accelerator)
    ends: list[float] = []
    monkeypatch.setattr(module, "sleep_until", ends.append)
    with torch.no_grad():
        assert not model(torch.zeros(ROWS)).requires_grad
    assert len(ends) == len(times)
    forward = sum(t.forward for t in times)
    assert ends[-1] - (ends[0] - times[0].forward) == pytest.approx(forward)


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid"])
@pytest.mark.parametrize("rates", [{}, {"host_copy": 1e8, "server_sum": 1e8}], ids=["free", "host pays"])
def test_the_engine_sends_what_it_would_send(comm: str, rates: dict[str, float]) -> None:
    """Payload as planned from the first iteration on: nothing has to be found out."""
    with torch.device("meta"):
        trial, x = wide(), torch.zeros(ROWS, 2, 8)
    sizes = observe(trial, lambda: trial(x))
    assert sizes["4.weight"].rows == ROWS

    def body(session: Session) -> tuple[float, float, dict[str, str]]:
        model, times, session.accelerator = parts("wide", **rates)
        emulate(model, times, session.accelerator)
        optimizer = EmulatedOptimizer(model.parameters(), session.accelerator)
        session.distribute(model, optimizer, comm=comm, sizes=sizes)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.zeros(ROWS)).backward()
            optimizer.step()
        report = session.report(model)
        return report["bytes_dense_per_iteration"], report["bytes_planned_per_iteration"], report["schemes"]

    for dense, planned, schemes in run_ranks(3, body):
        assert dense == planned
        assert schemes["4"] == ("ps" if comm == "ps" else "sfb")


def test_host_copies_and_sums_take_their_time() -> None:
    """One node alone: 240,000 bytes to the host, summed, and back, after the last layer at the latest."""

    def body(session: Session, **rates: float) -> float:
        model, times, session.accelerator = parts("wide", **rates)
        emulate(model, times, session.accelerator)
        optimizer = EmulatedOptimizer(model.parameters(), session.accelerator)
        session.distribute(model, optimizer, comm="ps", sizes={}, overlap="none")
        start = time.monotonic()
        model(torch.zeros(ROWS)).backward()
        return time.monotonic() - start

    nbytes = sum(p.numel() for p in wide().parameters()) * 4
    rate = nbytes / 0.03
    assert run_ranks(1, lambda session: body(session, host_copy=rate))[0] >= SECONDS + 0.03
    assert run_ranks(1, lambda session: body(session, server_sum=rate))[0] >= SECONDS + 0.03


def test_factors_have_their_share_of_non_zeros_and_their_product_is_charged_per_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, times, accelerator = parts("wide")
    emulate(model, times, accelerator, {"4": FactorDensity(u=0.25, v=0.5)})
    with torch.device("meta"):
        trial, x = wide(), torch.zeros(ROWS, 2, 8)
    sizes = observe(trial, lambda: trial(x))
    seen = {}

    def body(session: Session) -> None:
        session.accelerator = accelerator
        session.distribute(model, EmulatedOptimizer(model.parameters(), accelerator), comm="sfb", sizes=sizes)
        gather = session._engines()[0].plan.gradients.contribution

        def watch(unit, round_, rows):  # type: ignore[no-untyped-def]
            contribution = gather(unit, round_, rows)
            seen[unit.shape] = contribution.factors
            return contribution

        session._engines()[0].plan.gradients.contribution = watch  # type: ignore[method-assign]
        model(torch.zeros(ROWS)).backward()

    run_ranks(1, body)
    factors = seen[200, 300]
    assert factors is not None
    u, v = factors[: ROWS * 200], factors[ROWS * 200 :]
    assert int((u != 0).sum()) == pytest.approx(ROWS * 200 / 4, rel=0.1)  # scattered at random, as real ones are
    assert int((v != 0).sum()) == pytest.approx(ROWS * 300 / 2, rel=0.1)

    ends: list[float] = []
    monkeypatch.setattr(module, "sleep_until", ends.append)
    local = next(t for t in times if t.layer == "4")
    one = [module.Contribution(ROWS, factors=factors, k=ROWS)]
    accelerator.ready()
    accelerator.compute(0.0, "nothing")
    result = accelerator.reconstruct("4.weight", one * 8, torch.Size([200, 300]), torch.float32)
    assert result is not None
    assert result.shape == (200, 300)
    assert ends[1] - ends[0] == pytest.approx(8 * local.backward / 2, rel=0.02)
