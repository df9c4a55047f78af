"""Where a rank's rows are read off: whatever a model is given, whichever way the gradient comes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from poseidon.api import Session
from poseidon.engine.inputs import leading_rows
from tests.engine.nets import assert_exact
from tests.matrix.harness import COMMS, SIZES, Case, F, assert_equals_one_process, mean_square, vectors
from tests.ranks import run_ranks

Give = Callable[[torch.Tensor], tuple[Any, ...]]


class Net(nn.Module):
    """Two heads; what it is given is unpacked by a function."""

    def __init__(self, unpack: Callable[..., torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.unpack = unpack

    def forward(self, *given: Any) -> Any:
        return self.first(torch.tanh(self.body(self.unpack(*given))))


@dataclasses.dataclass
class Batch:
    name: str
    x: torch.Tensor


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.sizes, self.inner = [1.0, 2.0], {"x": x}


def top_lines(images: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([image[:, 0].flatten() for image in images])


def of_uneven_size(x: torch.Tensor) -> list[torch.Tensor]:
    """Images of 3 channels."""
    return [F.pad(row.reshape(3, 1, 2), (0, 0, 0, number % 3)) for number, row in enumerate(x)]


def packed(x: torch.Tensor) -> Any:
    lengths = torch.arange(len(x)) % 3 + 1
    return pack_padded_sequence(x[:, None].expand(-1, 3, -1), lengths, batch_first=True, enforce_sorted=False)


def parsed(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[float(word) for word in row.split()] for row in rows])


#: name -> (a batch (rows, 6) as it is given, how it is unpacked)
INPUTS: dict[str, tuple[Give, Callable[..., torch.Tensor]]] = {
    "dict": (lambda x: ({"id": 3, "x": x},), lambda d: d["x"]),
    "dict in a dict": (lambda x: ({"meta": {"epoch": 1}, "batch": {"x": x}},), lambda d: d["batch"]["x"]),
    "user dict": (lambda x: (collections.UserDict(x=x),), lambda d: d["x"]),
    "tuple": (lambda x: ((x,),), lambda t: t[0]),
    "tuple in a tuple": (lambda x: (("name", (x, x)),), lambda t: t[1][0]),
    "dataclass": (lambda x: (Batch("name", x),), lambda batch: batch.x),
    "object": (lambda x: (Opaque(x),), lambda o: o.inner["x"]),
    "0-d first": (lambda x: (torch.tensor(0.3), x), lambda t, x: t * x),
    "None first": (lambda x: (None, x), lambda _, x: x),
    "names first": (lambda x: (["a", "b"], x), lambda _, x: x),
    "numbers first": (lambda x: ([0.1, 0.2], x), lambda _, x: x),
    "array": (lambda x: (x.numpy(),), torch.from_numpy),
    "list of features": (lambda x: ([x, 2 * x],), lambda xs: xs[0] + xs[1]),
    "list of one": (lambda x: ([x],), lambda xs: xs[0]),
    "list of rows": (lambda x: (list(x),), torch.stack),
    "list of images": (lambda x: (of_uneven_size(x),), top_lines),
    "list of dicts": (lambda x: ([{"x": row} for row in x],), lambda rows: torch.stack([row["x"] for row in rows])),
    "list of texts": (lambda x: ([" ".join(map(str, r)) for r in x.tolist()],), parsed),
    "packed sequence": (lambda x: (packed(x),), lambda p: p.data[: int(p.batch_sizes[0])][p.unsorted_indices]),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name: str, sizes: list[int], comm: str, caplog: pytest.LogCaptureFixture) -> None:
    give, unpack = INPUTS[name]

    def step(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
        mean_square(model(*give(inputs[0])), number).backward()

    assert_equals_one_process(Case(lambda: Net(unpack), vectors(6), step=step), comm, sizes)
    assert not doubts(caplog)


def doubts(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in lines if not line.startswith("ranks have different numbers of rows")]


@pytest.mark.parametrize("given", [(), (3, "x", None), (object(),), (nn.Linear(1, 1),), ({"a": {}},)])
def test_nothing_to_read(given: tuple[Any, ...]) -> None:
    assert leading_rows(given, {}) is None


def test_a_container_in_itself() -> None:
    given: dict[str, Any] = {}
    given["self"] = given
    assert leading_rows((given,), {}) is None


# --- which forward passes count ----------------------------------------------------------------------------------


def two_forwards(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Of half the rows each."""
    (x,) = inputs
    half = len(x) // 2
    outs = [(model(x[:half]), number[:half]), (model(x[half:]), number[half:])]
    (sum((out.square().mean(1) * n).sum() for out, n in outs) / len(x)).backward()


class Choosing(Net):
    def forward(self, x: torch.Tensor, head: str) -> Any:
        return getattr(self, head)(torch.tanh(self.body(x)))


def each_head(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Some of a rank's rows go to each head: the one that is final first knows only of its share."""
    (x,) = inputs
    some = x[:, 0] > 0
    outs = [(model(x[some], "first"), number[some]), (model(x[~some], "second"), number[~some])]
    (sum((out.square().mean(1) * n).sum() for out, n in outs) / len(x)).backward()


def validates(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """With grad, on rank 0, and the graph is kept beyond the step."""
    if session is None or session.rank == 0:
        model.kept = [mean_square(model(torch.ones(20, 6)), torch.ones(20))]
    mean_square(model(*inputs), number).backward()


def validates_afterwards(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    out = model(*inputs)
    if session is None or session.rank == 0:
        model.kept = [*getattr(model, "kept", ()), model(torch.ones(20, 6))]
    mean_square(out, number).backward()


def two_losses(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Both forwards come first; each loss has a backward pass, and rows, of its own."""
    (x,) = inputs
    one, two = mean_square(model(x), number), mean_square(model(torch.cat([x, -x])), torch.cat([number, number]))
    one.backward()
    two.backward()


def one_loss_twice(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    (x,) = inputs
    one, two = mean_square(model(x), number), model(x[:1] if session is None or session.rank else x).sum() * 0
    one.backward(retain_graph=True)
    two.backward()
    one.backward()


def changes_output(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """In place; it is a view."""
    out = model(*inputs)
    out.mul_(2)
    mean_square(out, number).backward()


def forces(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """The loss is of a derivative with respect to the input, and misses the output itself."""
    x = inputs[0].clone().requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    mean_square(force, number).backward()


class Keeps(Net):
    """Its loss is an attribute."""

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> None:
        self.loss = mean_square(super().forward(x), number)


class Predicts(Keeps):
    def forward(self, x: torch.Tensor, number: torch.Tensor) -> Any:
        out = Net.forward(self, x)
        self.loss = mean_square(out, number)
        return out.softmax(1)


class Bypassed(Net):
    def training_step(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return mean_square(Net.forward(self, x), number)


class LossOfList(Net):
    def forward(self, xs: list[torch.Tensor], number: torch.Tensor) -> torch.Tensor:
        return mean_square(super().forward(xs[0] + xs[1]), number)


def kept_loss(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    model(*inputs, number)
    model.loss.backward()


def squeezed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2)))


PASSES = {
    "two forwards, one backward": Case(Net, vectors(6), step=two_forwards),
    "heads": Case(Choosing, vectors(6), step=each_head),
    "validation kept": Case(Net, vectors(6), step=validates),
    "validation kept, after the forward": Case(Net, vectors(6), step=validates_afterwards),
    "two losses": Case(Net, vectors(6), step=two_losses),
    "a loss again": Case(Net, vectors(6), step=one_loss_twice),
    "output changed in place": Case(squeezed, vectors(6), step=changes_output),
    "forces": Case(Net, vectors(6), step=forces),
    "returns nothing": Case(Keeps, vectors(6), step=kept_loss),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", PASSES)
def test_forward_passes(name: str, sizes: list[int], comm: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_equals_one_process(PASSES[name], comm, sizes)
    assert not doubts(caplog)


def test_gradients_that_are_assigned_are_averaged_when_the_optimizer_steps() -> None:
    """Two tasks' gradients by autograd.grad in a helper."""

    def train(model: Any, take: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
        used = [*model.body.parameters(), *model.first.parameters()]
        optimizer = torch.optim.SGD(used, lr=0.1)
        for step in range(3):
            x = take(torch.randn(8, 6, generator=torch.Generator().manual_seed(step)))

            def of_task(k: int, x: torch.Tensor = x) -> Any:
                return torch.autograd.grad(model(x)[:, k].square().mean(), used)

            for p, one, two in zip(used, of_task(0), of_task(1), strict=True):
                p.grad = one + two
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    base = Net()

    def body(session: Session) -> list[torch.Tensor | None]:
        model = copy.deepcopy(base)
        session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return train(model, lambda x: x[5:] if session.rank else x[:5])

    want = train(copy.deepcopy(base), lambda x: x)
    for got in run_ranks(2, body):
        assert_exact(got, want)


# --- what cannot be read -------------------------------------------------------------------------------------------


def bypass(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    model.training_step(*inputs, number).backward()


def bypass_said(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    if session is not None:
        session.rows(len(number))
    bypass(model, optimizer, inputs, number, session)


def list_loss(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    model([inputs[0], inputs[0]], number).backward()


UNREAD = {
    "a method": (Case(Bypassed, vectors(6), step=bypass), "without a forward pass"),
    "a list, and a loss": (Case(LossOfList, vectors(6), step=list_loss), "list of tensors"),
    "no output of the model": (Case(Predicts, vectors(6), step=kept_loss), "through no output"),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("name", UNREAD)
def test_ranks_in_doubt_say_so_once(name: str, comm: str, caplog: pytest.LogCaptureFixture) -> None:
    case, words = UNREAD[name]
    assert_equals_one_process(case, comm, [3, 3])
    lines = doubts(caplog)
    assert lines[0] != lines[-1] or len(lines) == 1  # a rank that has not heard of rank 0's doubt says so too
    assert any(line.startswith("rank 0: ") for line in lines)
    assert all(words in line and "session.rows(n)" in line for line in lines)


@pytest.mark.parametrize("comm", COMMS)
def test_a_rank_that_is_alone_in_doubt_says_so_itself(comm: str, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
        if session is not None and session.rank == 1:
            bypass(model, optimizer, inputs, number, session)
        else:
            mean_square(model(*inputs), number).backward()

    assert_equals_one_process(Case(Bypassed, vectors(6), step=step), comm, [1, 1])  # it counts as one row
    (line,) = doubts(caplog)
    assert line.startswith("rank 1: ")


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("case", [Case(Bypassed, vectors(6), step=bypass_said)], ids=["said"])
def test_what_is_said_is_no_doubt(case: Case, comm: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_equals_one_process(case, comm, [5, 3])
    assert not doubts(caplog)


@pytest.mark.parametrize("comm", COMMS)
def test_equal_rows_need_no_reading(comm: str, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(Bypassed, vectors(6), step=bypass, options={"rows": "equal"})
    assert_equals_one_process(case, comm, [3, 3])
    assert not doubts(caplog)
