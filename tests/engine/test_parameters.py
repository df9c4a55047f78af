"""What a trial on the meta device sees of a model must be what the engine finds in iteration 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from poseidon.engine.parameters import observe, tensors_in, trainable
from tests.ranks import run_ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.inner(self.embed(x)))


class Functional(nn.Module):
    """A weight that is also used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x)) + functional.linear(x, self.b.weight)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return {"out": self.a(self.a(x).relu())}


class Shared(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.a.weight.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


class Sequence(nn.Module):
    """Linear layers on (rows, positions, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.mlp = nn.Linear(6, 6)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Any) -> Any:
        x = x.unsqueeze(1).expand(-1, 5, -1)
        return self.normed(self.mlp(self.attention(x, x, x)[0])), 3


FLOATS = torch.float32
CASES = {
    "tied": (Tied, (4, 7), torch.int64, {"inner.weight": 28}),
    "functional": (Functional, (4, 6), FLOATS, {"a.weight": 4}),
    "twice": (Twice, (4, 6), FLOATS, {"a.weight": 8}),
    "shared": (Shared, (4, 6), FLOATS, {"a.weight": 8}),
    "frozen": (Frozen, (4, 6), FLOATS, {"b.weight": 4}),
    "sequence": (Sequence, (4, 6), FLOATS, {"mlp.weight": 20}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_on_the_meta_device(name):
    make, shape, dtype, want = CASES[name]
    with torch.device("meta"):
        model = make()
        seen = observe(model, lambda: model(torch.zeros(shape, dtype=dtype)))
    assert {key: size.rows for key, size in seen.items() if key in factorable(model)} == want
    assert {size.itemsize for size in seen.values()} == {4}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_finds_the_same(name):
    make, shape, dtype, want = CASES[name]
    torch.manual_seed(0)
    base = make()

    def body(session: Any) -> dict[str, int]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="sfb")
        x = torch.zeros(shape, dtype=dtype) if dtype != FLOATS else torch.ones(shape)
        sum(t.sum() for t in tensors_in(model(x))).backward()
        optimizer.step()
        return {row["param"]: row["rows"] for row in session.report(model)["plan"] if row["rows"]}

    assert run_ranks(2, body) == [want] * 2


def test_it_leaves_the_model_as_it_was():
    model = Twice()
    model.a.weight.grad = torch.ones(6, 6)
    observe(model, lambda: model(torch.ones(3, 6)))
    assert type(model.a) is nn.Linear
    assert torch.equal(model.a.weight.grad, torch.ones(6, 6))
    assert model.a.bias.grad is None
    assert not model.a.weight._backward_hooks


def test_objects_that_are_no_containers():
    class Output:
        def __init__(self) -> None:
            self.logits, self.aux = torch.ones(2), [torch.ones(3), None]

    assert [t.shape[0] for t in tensors_in({"a": Output(), "b": (torch.ones(4),)})] == [2, 3, 4]


def factorable(model: nn.Module) -> set[str]:
    return {info.name for info in trainable(model)[1] if info.factors}
