"""A layer that records is, to everything but its weight's gradient, the layer that it was."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.engine.capture import Factors, Record, attach, can_capture
from poseidon.engine.embedding import attach_rows
from poseidon.engine.rows import Rows

SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "1-D": lambda: torch.randn(6),
    "2-D": lambda: torch.randn(5, 6),
    "3-D": lambda: torch.randn(2, 5, 6),
    "4-D": lambda: torch.randn(2, 3, 5, 6),
    "1-D with gaps": lambda: torch.randn(12)[::2],
    "3-D with gaps": lambda: torch.randn(3, 9, 6)[:, :5],
    "no rows": lambda: torch.randn(0, 6),
    "no rows, 3-D": lambda: torch.randn(2, 0, 6),
    "transposed": lambda: torch.randn(6, 5).t(),
    "transposed, 3-D": lambda: torch.randn(5, 2, 6).transpose(0, 1),
}


@contextmanager
def recording(module: nn.Module) -> Iterator[Record]:
    weight: Any = module.weight
    record: Record
    if isinstance(module, nn.Linear):
        record = Factors(weight)
        attach(module, record)
    else:
        record = Rows(weight)
        attach_rows(module, record)
    try:
        yield record
    finally:
        record.factors.clear()
        record.close()


def saved(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """What is computed, and what is kept for backward: what checkpoints compare."""
    seen: list[Any] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append((t.shape, t.dtype, t.detach().clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call()
    return out, seen


def assert_same(call: Callable[[], torch.Tensor], module: nn.Module) -> None:
    want, natively = saved(call)
    with recording(module):
        got, kept = saved(call)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert [entry[:2] for entry in kept] == [entry[:2] for entry in natively]
    for (*_, mine), (*_, theirs) in zip(kept, natively, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_keeps_for_backward_what_it_would(shape: str) -> None:
    for bias, needs_x, cast in itertools.product([True, False], [True, False], [None, torch.bfloat16]):
        module, x = nn.Linear(6, 4, bias=bias), SHAPES[shape]().requires_grad_(needs_x)
        with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
            assert_same(lambda module=module, x=x: module(x), module)  # type: ignore[misc]


@pytest.mark.parametrize("ids", [torch.tensor([[1, 2, 1], [0, 3, 1]]), torch.tensor([3, 1]), torch.tensor(2)])
def test_embeddings_keep_for_backward_what_they_would(ids: torch.Tensor) -> None:
    module = nn.Embedding(5, 3, padding_idx=1)
    assert_same(lambda: module(ids), module)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("given", ["2-D", "offsets", "factors"])
def test_bags_keep_for_backward_what_they_would(mode: str, given: str) -> None:
    if given == "factors" and mode != "sum":
        pytest.skip("not in torch")
    module = nn.EmbeddingBag(5, 3, mode=mode)
    ids = torch.tensor([[1, 2, 1], [0, 3, 1]])
    calls = {
        "2-D": lambda: module(ids),
        "offsets": lambda: module(ids.reshape(-1), torch.tensor([0, 2])),
        "factors": lambda: module(ids, per_sample_weights=torch.ones(2, 3, requires_grad=True)),
    }
    assert_same(calls[given], module)


def test_no_more_is_cast_than_autocast_would() -> None:
    """It leaves alone what is more precise on purpose."""
    module, x = nn.Linear(6, 4).double(), torch.randn(5, 6, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(lambda: module(x), module)


def test_a_graph_of_before_the_end_gives_a_gradient() -> None:
    """Of a layer that was set free in between, and whose weight may be recorded elsewhere by then."""
    for module, x in ((nn.Linear(6, 4), torch.randn(5, 6)), (nn.Embedding(5, 3), torch.tensor([1, 2, 1]))):
        module(x).square().sum().backward()
        want = module.weight.grad
        for again in (False, True):
            module.zero_grad()
            with recording(module):
                out = module(x)
            if again:
                with recording(module):
                    out.square().sum().backward()
            else:
                out.square().sum().backward()
            torch.testing.assert_close(module.weight.grad, want)


def test_what_was_recorded_when_the_end_comes_is_in_the_gradient() -> None:
    module: Any = nn.Linear(6, 4)
    x = torch.randn(5, 6)
    module(x).square().sum().backward()
    want = module.weight.grad
    module.zero_grad()
    record = Factors(module.weight)
    attach(module, record)
    module(x).square().sum().backward()
    assert module.weight.grad is None
    record.close()
    torch.testing.assert_close(module.weight.grad, want)


@pytest.mark.parametrize("paused", [True, False])
def test_what_becomes_of_a_gradient_is_decided_in_backward(paused: bool) -> None:
    module, x = nn.Linear(6, 4), torch.randn(5, 6)
    with recording(module) as record:
        record.paused = not paused
        out = module(x).square().sum()
        record.paused = paused
        out.backward()
        assert (module.weight.grad is not None) == paused
        assert len(record.factors) == (not paused)


def test_a_hook_that_comes_between_forward_and_backward_sees_a_gradient() -> None:
    module, x = nn.Linear(6, 4), torch.randn(5, 6)
    with recording(module) as record:
        out = module(x).square().sum()
        seen: list[Any] = []
        module.weight.register_hook(lambda grad: seen.append(grad))
        out.backward()
        assert isinstance(seen[0], torch.Tensor)
        assert not record.factors


def test_complex_layers_are_left_alone() -> None:
    assert not can_capture(nn.Linear(6, 4, dtype=torch.complex64))


LAYERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(6, 4),
    "embedding": lambda: nn.Embedding(6, 4),
    "bag": lambda: nn.EmbeddingBag(6, 4),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_of_it_is_in_a_copy(kind: str) -> None:
    module = LAYERS[kind]()
    attributes = set(vars(module))
    before = copy.deepcopy(module)
    with recording(module):
        for copied in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert set(vars(copied)) == attributes
            assert type(copied) is type(before)
        assert type(module) is type(before)
        assert repr(module) == repr(before)
        assert list(module.state_dict()) == list(before.state_dict())
        assert list(inspect.signature(module.forward).parameters) == list(inspect.signature(before.forward).parameters)
    assert set(vars(module)) == attributes


def test_somebody_elses_forward_stays() -> None:
    """One that was there before, and one that stands around ours, which goes on when that is gone."""
    module: Any = nn.Linear(6, 4)
    x = torch.randn(5, 6)
    want = module(x)

    def around(forward: Any) -> Any:
        return lambda input: forward(input) + 1

    module.forward = around(module.forward)
    with recording(module) as record:
        assert torch.equal(module(x), want + 1)
        assert not record.factors
    assert torch.equal(module(x), want + 1)
    del module.forward
    with recording(module) as record:
        module.forward = around(module.forward)
        module(x).sum().backward()
        assert len(record.factors) == 1
    assert torch.equal(module(x), want + 1)
    module.zero_grad()
    module(x).sum().backward()
    assert module.weight.grad is not None


def test_second_derivatives_reach_the_weight() -> None:
    module, x = nn.Linear(6, 4), torch.randn(5, 6, requires_grad=True)

    def penalty() -> torch.Tensor:
        (gx,) = torch.autograd.grad(module(x).tanh().sum(), x, create_graph=True)
        gx.square().sum().backward()
        assert module.weight.grad is not None
        return module.weight.grad

    want = penalty().clone()
    module.zero_grad()
    with recording(module) as record:
        penalty()
        grad = record.spend(module.weight.grad)
    torch.testing.assert_close(grad, want)


def test_its_result_may_be_changed_in_place() -> None:
    module = nn.Linear(6, 4)
    with recording(module):
        for shape in SHAPES.values():
            module(shape()).relu_().sum().backward()
