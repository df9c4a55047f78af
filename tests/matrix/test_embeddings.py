"""Every kind and use of an embedding, against one process; what is sent for it, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poseidon.api import Session
from tests.matrix.harness import COMMS, SIZES, Case, assert_equals_one_process, mean_square, tokens
from tests.ranks import checkpoint

V, D, POSITIONS = 60, 6, 4


class Net(nn.Module):
    """An embedding (and perhaps a second one) before a linear layer; how they are used is given."""

    def __init__(self, forward: Any = None, embed: nn.Module | None = None, **others: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D) if embed is None else embed
        self.out = nn.Linear(D, 4)
        for name, module in others.items():
            setattr(self, name, module)
        self.function = forward or looked_up

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.out(torch.tanh(self.function(self, *inputs)))


def looked_up(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids).mean(1)


def in_place(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids).mul_(2).relu_().mean(1)


def twice(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids).mean(1) + torch.sin(self.embed(ids[:, :2].flip(0)).flip(0).sum(1))


def both(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids).mean(1) + torch.sin(self.other(ids[:, :3]).sum(1))


def flat(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """1-D and 3-D indices."""
    return self.embed(ids[:, 0]) + self.embed(ids.unsqueeze(1).int()).flatten(1, 2).mean(1)


def one_by_one(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """0-d indices."""
    return torch.stack([self.embed(row[0]) for row in ids])


def tied(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return (self.embed(ids).mean(1) @ self.embed.weight.t()).tanh() @ self.embed.weight


def functional(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids).mean(1) + F.embedding(ids[:, :1], self.embed.weight).sum(1)


def decayed(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids).mean(1) + self.embed.weight.square().sum()


def checkpointed(reentrant: bool) -> Any:
    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(len(ids), D, requires_grad=True)
        return checkpoint(lambda x, y: x + self.embed(y).mean(1), start, ids, use_reentrant=reentrant)

    return forward


def bag_of_rows(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """1-D input with offsets: bags of 1 to 4, one of them empty if there are several."""
    lengths = [1 + int(row[0]) % POSITIONS for row in ids]
    flat = torch.cat([row[:length] for row, length in zip(ids, lengths, strict=True)])
    return self.embed(flat, torch.tensor([0, *lengths[:-1]]).cumsum(0))


def last_offset(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids.reshape(-1), torch.arange(0, ids.numel() + 1, POSITIONS))


def empty_bags(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """A row's bag, and an empty one."""
    starts = torch.arange(len(ids)) * POSITIONS
    bags = self.embed(ids.reshape(-1), torch.stack([starts, starts], 1).reshape(-1))
    return bags.view(len(ids), 2, D).sum(1)


def weighted_bag(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids, per_sample_weights=self.factors[ids])


def tables(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return self.embed(ids) + self.other(ids).mean(1)


def bag(mode: str, forward: Any = looked_up, **options: Any) -> Callable[[], nn.Module]:
    if forward is looked_up:
        forward = lambda self, ids: self.embed(ids)  # noqa: E731
    return lambda: Net(forward, nn.EmbeddingBag(V, D, mode=mode, **options))


def shared(forward: Any = both, **options: Any) -> Callable[[], nn.Module]:
    """Two embeddings with one weight; the first one's options differ."""

    def make() -> nn.Module:
        model = Net(forward, nn.Embedding(V, D, **options), other=nn.Embedding(V, D))
        model.other.weight = model.embed.weight
        return model

    return make


def embedding(forward: Any = looked_up, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Net(forward, nn.Embedding(V, D, **options))


def head() -> nn.Module:
    """The head comes first, and has the embedding's weight."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.embed = nn.Linear(D, V, bias=False), nn.Embedding(V, D)
            self.embed.weight = self.head.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    return Model()


def frozen() -> nn.Module:
    model = Net(both, other=nn.Embedding(V, D))
    model.embed.requires_grad_(False)
    return model


def accumulated(no_sync: bool) -> Any:
    """Two micro-batches, every rank's share the same in both."""

    def step(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
        (ids,) = inputs
        if session is not None:
            session.rows(len(ids))
        first = mean_square(model(ids), number) / 2
        if session is not None and no_sync:
            with session.no_sync():
                first.backward()
                (mean_square(model(ids.flip(1)[:, :2]), number) / 4).backward()
        else:
            first.backward()
            (mean_square(model(ids.flip(1)[:, :2]), number) / 4).backward()
        (mean_square(model((ids + 1) % V), number) / 2).backward()

    return step


def zeroed(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    mean_square(model(*inputs), number).backward()


def left_out(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """From the second step on, by all ranks."""
    later = bool(optimizer.state)
    say(session, number)
    rows = torch.ones(len(number), D) if later else model.embed(inputs[0]).mean(1)
    mean_square(model.out(torch.tanh(rows)), number).backward()


def on_some_ranks(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Rank 0 looks nothing up."""
    (ids,) = inputs
    say(session, number)
    number_of_0 = (SIZES[0] if len(ids) == sum(SIZES[0]) else SIZES[1])[0] if session is None else len(ids)
    first = number_of_0 if session is None or session.rank == 0 else 0
    rows = torch.zeros(first, D)
    if first < len(ids):
        rows = torch.cat([rows, model.embed(ids[first:]).mean(1)])
    mean_square(model.out(torch.tanh(rows)), number).backward()


def say(session: Session | None, number: torch.Tensor) -> None:
    """The root's forward, which tells the rows, is not called."""
    if session is not None:
        session.rows(len(number))


def penalty(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Double backward through the looked-up rows."""
    say(session, number)
    hidden = model.embed(inputs[0])
    out = model.out(torch.tanh(hidden.mean(1)))
    (grad,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    (mean_square(out, number) + mean_square(grad, number)).backward()


def create_graph(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    mean_square(model(*inputs), number).backward(create_graph=True)
    for p in model.parameters():
        p.grad = p.grad.detach()


def looks_first(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    loss = mean_square(model(*inputs), number)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def hooked(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    handle = model.embed.weight.register_hook(lambda grad: grad * 2)
    mean_square(model(*inputs), number).backward()
    handle.remove()


def retained(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    loss = mean_square(model(*inputs), number)
    loss.backward(retain_graph=True)
    loss.backward()


def autocast(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """In fp32 whatever autocast says; the linear layer stays out of it, since bf16 rounds by the batch."""
    say(session, number)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.embed(inputs[0])
    assert hidden.dtype == torch.float32
    mean_square(model.out(torch.tanh(hidden.mean(1))), number).backward()


def compiled(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    mean_square(torch.compile(model, backend="eager")(*inputs), number).backward()


def functorch(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(model, p, inputs).sum())(parameters)
    mean_square(model(*inputs), number).backward()


def copies(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Of a distributed model: plain layers that take no part."""
    for other in (copy.deepcopy(model.embed), pickle.loads(pickle.dumps(model.embed))):
        assert type(other) in (nn.Embedding, nn.EmbeddingBag)
        other(inputs[0]).sum().backward()
        assert repr(other) == repr(model.embed)
    mean_square(model(*inputs), number).backward()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without what torch refuses for sparse gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


ids = tokens(V, POSITIONS)
few = tokens(7, POSITIONS)  # most ids that no rank sees, many seen several times
CASES = {
    "plain": Case(embedding(), ids),
    "float64": Case(lambda: embedding()().double(), ids),
    "changed in place": Case(embedding(in_place), ids),
    "padding": Case(embedding(padding_idx=3), few),
    "padding, negative": Case(embedding(padding_idx=-1), ids),
    "by frequency": Case(embedding(scale_grad_by_freq=True), few),
    "by frequency, padding": Case(embedding(scale_grad_by_freq=True, padding_idx=2), few),
    "by frequency, twice": Case(embedding(twice, scale_grad_by_freq=True), few),
    "by frequency, no_sync": Case(embedding(scale_grad_by_freq=True), few, step=accumulated(True)),
    "by frequency, accumulated": Case(embedding(scale_grad_by_freq=True), few, step=accumulated(False)),
    "by frequency, zeroed": Case(embedding(scale_grad_by_freq=True), few, step=zeroed),
    "by frequency, some ranks": Case(embedding(scale_grad_by_freq=True), few, step=on_some_ranks),
    "by frequency, autograd.grad before": Case(embedding(scale_grad_by_freq=True), few, step=looks_first),
    "by frequency, the other not": Case(shared(scale_grad_by_freq=True), few),
    "by frequency, checkpoint": Case(embedding(checkpointed(True), scale_grad_by_freq=True), few),
    "sparse": Case(embedding(sparse=True), ids, optimizer=sgd),
    "sparse, Adagrad": Case(embedding(sparse=True), few, optimizer=adagrad),
    "sparse, twice": Case(embedding(twice, sparse=True), ids, optimizer=sgd),
    "sparse, no_sync": Case(embedding(sparse=True), ids, optimizer=sgd, step=accumulated(True)),
    "sparse, accumulated": Case(embedding(sparse=True), ids, optimizer=sgd, step=accumulated(False)),
    "sparse, the other not": Case(shared(sparse=True), ids),
    "sparse, functional": Case(embedding(functional, sparse=True), ids),
    "sparse, some ranks": Case(embedding(sparse=True), ids, optimizer=sgd, step=on_some_ranks),
    "twice": Case(embedding(twice), ids),
    "two with one weight": Case(shared(padding_idx=5), ids),
    "1-D, 3-D, int32": Case(embedding(flat), ids),
    "0-d": Case(embedding(one_by_one), ids),
    "few ids": Case(embedding(), few),
    "frozen": Case(frozen, ids),
    "tied": Case(embedding(tied), ids),
    "tied head first": Case(head, ids),
    "functional use": Case(embedding(functional), ids),
    "penalty on the weight": Case(embedding(decayed), ids),
    "checkpoint": Case(embedding(checkpointed(False)), ids),
    "checkpoint, reentrant": Case(embedding(checkpointed(True)), ids),
    "no_sync": Case(embedding(), ids, step=accumulated(True)),
    "accumulated": Case(embedding(), ids, step=accumulated(False)),
    "zeroed": Case(embedding(), ids, step=zeroed),
    "left out later": Case(embedding(), ids, step=left_out),
    "on some ranks": Case(embedding(), ids, step=on_some_ranks),
    "gradient penalty": Case(embedding(), ids, step=penalty),
    "create_graph": Case(embedding(), ids, step=create_graph),
    "autograd.grad before": Case(embedding(), ids, step=looks_first),
    "user hook": Case(embedding(), ids, step=hooked),
    "retained": Case(embedding(), ids, step=retained),
    "autocast": Case(embedding(), ids, step=autocast),
    "compiled": Case(embedding(), ids, step=compiled),
    "functorch": Case(embedding(), ids, step=functorch),
    "copies": Case(embedding(), ids, step=copies),
    "bag of copies": Case(bag("mean"), ids, step=copies),
    "bag, sum": Case(bag("sum"), ids),
    "bag, mean": Case(bag("mean"), few),
    "bag, max": Case(bag("max"), few),
    "bag, max, padding": Case(bag("max", padding_idx=2), few),
    "bag, mean, padding": Case(bag("mean", padding_idx=2), few),
    "bag, sum, offsets": Case(bag("sum", bag_of_rows), ids),
    "bag, mean, offsets": Case(bag("mean", bag_of_rows), ids),
    "bag, max, offsets": Case(bag("max", bag_of_rows), ids),
    "bag, mean, last offset": Case(bag("mean", last_offset, include_last_offset=True), ids),
    "bag, mean, empty": Case(bag("mean", empty_bags), ids),
    "bag, max, empty": Case(bag("max", empty_bags), ids),
    "bag, weighted": Case(
        lambda: Net(weighted_bag, nn.EmbeddingBag(V, D, mode="sum"), factors=nn.Parameter(torch.rand(V))), few
    ),
    "bag, weighted, padding": Case(
        lambda: Net(
            weighted_bag, nn.EmbeddingBag(V, D, mode="sum", padding_idx=1), factors=nn.Parameter(torch.rand(V))
        ),
        few,
    ),
    "bag, by frequency": Case(bag("mean", scale_grad_by_freq=True), few),
    "bag, by frequency, offsets": Case(bag("sum", bag_of_rows, scale_grad_by_freq=True), few),
    "bag, sparse": Case(bag("sum", sparse=True), ids, optimizer=sgd),
    "bag, sparse, mean": Case(bag("mean", bag_of_rows, sparse=True), few, optimizer=sgd),
    "bag and embedding": Case(lambda: Net(tables, nn.EmbeddingBag(V, D), other=nn.Embedding(V, D)), ids),
}
#: Where the gradient is dense, or natively computed, and all of it may go by PS.
DENSE = {"tied", "tied head first", "penalty on the weight", "sparse, functional"}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    reports = assert_equals_one_process(CASES[name], comm, sizes)
    schemes = {report["schemes"].get("embed", "rows") for report in reports}
    assert schemes <= {"rows", "ps"}
    assert name in DENSE or name == "frozen" or schemes == {"rows"}
