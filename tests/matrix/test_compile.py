"""torch.compile, tracing and export, of a distributed model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from tests.matrix.harness import Case, assert_equals_one_process, mean_square, vectors
from tests.ranks import run_ranks

#: One rank after the other: PyTorch's compilers and tracers are no threads' friends.
COMPILER = threading.Lock()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = block(6, 8), block(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x))
        return out


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def one_after_the_other(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    with COMPILER:
        loss = mean_square(model(*inputs), number)
    loss.backward()


def wrapped(backend: str) -> Callable[[Any], Any]:
    return lambda model: torch.compile(model, backend=backend)


def in_place(backend: str) -> Callable[[Any], Any]:
    def compile_(model: Any) -> Any:
        model.compile(backend=backend)
        return model

    return compile_


def by_block(backend: str) -> Callable[[Any], Any]:
    def compile_(model: Any) -> Any:
        model.first.compile(backend=backend)
        model.last.compile(backend=backend)
        return model

    return compile_


def only_first(backend: str) -> Callable[[Any], Any]:
    def compile_(model: Any) -> Any:
        model.first.compile(backend=backend)
        return model

    return compile_


WAYS = {"wrapped": wrapped, "in place": in_place, "by block": by_block, "one block": only_first}


def compiled(way: str, backend: str, before: bool) -> Case:
    compile_ = WAYS[way](backend)
    if before:
        return Case(Net, vectors(6), step=one_after_the_other, optimizer=lambda model: (compile_(model), sgd(model))[1])
    return Case(Net, vectors(6), step=one_after_the_other, after=compile_)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "before", "backend"),
    [
        ("wrapped", False, "eager"),
        pytest.param("wrapped", False, "aot_eager", marks=SLOW),
        ("in place", True, "aot_eager"),
        pytest.param("in place", False, "aot_eager", marks=SLOW),
        pytest.param("by block", True, "aot_eager", marks=SLOW),
        ("by block", False, "eager"),
        ("one block", True, "eager"),
        pytest.param("one block", False, "aot_eager", marks=SLOW),
    ],
)
def test_compiled_models_equal_one_process(way: str, before: bool, backend: str) -> None:
    reports = assert_equals_one_process(compiled(way, backend, before), "hybrid", [5, 3])
    # What is compiled computes its gradients natively; the rest keeps its factors.
    assert set(reports[0]["schemes"].values()) == {"ps", *(["sfb"] if way == "one block" else [])}


@SLOW
@pytest.mark.parametrize("comm", ["ps", "hybrid"])
def test_a_compiled_wrapper_is_distributed_itself(comm: str) -> None:
    case = Case(lambda: torch.compile(Net(), backend="aot_eager"), vectors(6), step=one_after_the_other)  # type: ignore[arg-type, return-value]
    assert_equals_one_process(case, comm, [5, 3])


@SLOW
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["wrapped", "by block"])
def test_inductor(way: str) -> None:
    assert_equals_one_process(compiled(way, "inductor", False), "hybrid", [5, 3])


def traces(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.trace(model, x)


def exports(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


def copies(model: nn.Module, x: torch.Tensor) -> Any:
    return copy.deepcopy(model)


@pytest.mark.parametrize("make", [traces, exports, copies])
def test_what_is_made_of_a_distributed_model_is_the_plain_one(make: Any) -> None:
    """And training goes on."""
    torch.manual_seed(0)
    base, x = Net(), torch.randn(5, 6)

    def body(session: Session) -> tuple[list[torch.Tensor], str]:
        model = copy.deepcopy(base)
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm="sfb")
        differences = []
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            with COMPILER:
                made = make(model, x)
            differences.append((made(x) - model(x)).detach().abs().max())
        return differences, session.digest(model)

    ranks = run_ranks(2, body)
    assert all(float(worst) < 1e-6 for differences, _ in ranks for worst in differences)
    assert len({digest for _, digest in ranks}) == 1


def test_scripted_once_it_is_plain_again() -> None:
    torch.manual_seed(0)
    base, x = Net(), torch.randn(5, 6)

    def body(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        model = copy.deepcopy(base)
        session.distribute(model, sgd(model), comm="sfb")
        model(x).square().mean().backward()
        session.undistribute(model)
        with COMPILER:
            return model(x), torch.jit.script(model)(x)

    for plain, scripted in run_ranks(2, body):
        torch.testing.assert_close(scripted, plain)


@pytest.mark.parametrize(("way", "hints"), [("wrapped", 1), ("in place", 1), ("by block", 0)])
def test_compiling_by_block_is_hinted_at_once(way: str, hints: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    base, x = Net(), torch.randn(5, 6)
    ways = {"wrapped": wrapped, "in place": in_place, "by block": by_block}

    def body(session: Session) -> None:
        model = ways[way]("eager")(copy.deepcopy(base))
        optimizer = sgd(model)
        session.distribute(model, optimizer)
        for _ in range(3):
            with COMPILER:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()

    run_ranks(2, body)
    assert sum("block.compile()" in record.getMessage() for record in caplog.records) == hints
