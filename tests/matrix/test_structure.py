"""Every structure of a model and of its use, against one process."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix.harness import COMMS, SIZES, Case, F, assert_equals_one_process, mean_square, tokens, vectors

Point = collections.namedtuple("Point", "first second")


class Net(nn.Module):
    """A small network whose forward is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.function = forward

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def skips_b(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.c(torch.tanh(self.a(x)))


def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.c(torch.tanh(self.b(torch.tanh(self.b(torch.tanh(self.a(x)))))))


def directly(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer's weight is also used by a function."""
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) + F.linear(x, self.a.weight)[:, :4]


@dataclasses.dataclass
class Answer:
    first: torch.Tensor
    second: torch.Tensor


class Opaque:
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


def both(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.tanh(self.a(x))
    return self.b(hidden), self.c(hidden)


def of(kind: Any, get: Any) -> Case:
    """A model that returns its two outputs in some container."""

    def loss(output: Any, number: torch.Tensor) -> torch.Tensor:
        first, second = get(output)
        return mean_square(first, number) + mean_square(second, number)

    return Case(lambda: Net(lambda self, x: kind(*both(self, x))), vectors(6), loss)


def fields(output: Any) -> Any:
    return output.first, output.second


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


class SharedLayer(nn.Module):
    """One weight in two layers with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def frozen() -> nn.Module:
    model = Net(plain)
    model.b.requires_grad_(False)
    return model


def two_forwards(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Of the same rows: one loss of both."""
    (x,) = inputs
    if session is not None:
        session.rows(len(x))
    (mean_square(model(x), number) + mean_square(model(-x), number)).backward()


def two_backwards(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    (x,) = inputs
    mean_square(model(x), number).backward()
    mean_square(model(2 * x), number).backward()


def branches(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Ranks differ in the order of what they compute; the sum is the same."""
    (x,) = inputs
    if session is not None and session.rank:
        loss = mean_square(model.b(torch.tanh(model.a(x))), number) + mean_square(model(x), number)
    else:
        loss = mean_square(model(x), number) + mean_square(model.b(torch.tanh(model.a(x))), number)
    if session is not None:
        session.rows(len(x))
    loss.backward()


CASES = {
    "plain": Case(lambda: Net(plain), vectors(6)),
    "never used": Case(lambda: Net(skips_b), vectors(6)),
    "layer called twice": Case(lambda: Net(twice), vectors(6)),
    "weight also used directly": Case(lambda: Net(directly), vectors(6)),
    "weight in two layers": Case(SharedLayer, vectors(6)),
    "tied embedding and head": Case(Tied, tokens(20, 5)),
    "frozen": Case(frozen, vectors(6)),
    "tuple": of(lambda first, second: (first, second), tuple),
    "list": of(lambda first, second: [first, second], tuple),
    "dict": of(lambda first, second: {"first": first, "second": second}, lambda out: (out["first"], out["second"])),
    "named tuple": of(Point, tuple),
    "dataclass": of(Answer, fields),
    "object": of(Opaque, fields),
    "two forwards": Case(lambda: Net(plain), vectors(6), step=two_forwards),
    "two backwards": Case(lambda: Net(plain), vectors(6), step=two_backwards),
    "orders that differ": Case(lambda: Net(plain), vectors(6), step=branches),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    assert_equals_one_process(CASES[name], comm, sizes)
