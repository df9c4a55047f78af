"""Batch-norm over all ranks' rows against one process that has them all, in real processes."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import poseidon
from poseidon.errors import UserError
from tests.api.test_processes import run_script

AGAINST_ONE_PROCESS = """
import copy
import torch
from torch import nn
import poseidon
from tests.engine.nets import assert_exact, grads, sgd

ROWS = {"as many": [4, 4, 4], "uneven": [2, 5, 1], "none": [3, 0, 4]}

# No bias before a batch-norm: its gradient is zero but for rounding, whose size says nothing.
def conv():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))

MODELS = {
    "conv": (conv, (3, 8, 8)),
    "channels_last": (lambda: conv().to(memory_format=torch.channels_last), (3, 8, 8)),
    "volume": (lambda: nn.Sequential(nn.Conv3d(1, 4, 2, bias=False), nn.BatchNorm3d(4, momentum=None), nn.Flatten(),
                                     nn.Linear(4 * 27, 3)), (1, 4, 4, 4)),
    "plain": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "sequence": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4, affine=False), nn.Flatten(),
                                       nn.Linear(4 * 6, 3)), (2, 8)),
    "no running": (lambda: nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)), (6,)),
    "of torch": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(conv()), (3, 8, 8)),
    "frozen": (lambda: conv().requires_grad_(False).append(nn.Linear(3, 3)), (3, 8, 8)),
}

def plain(model):
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = nn.BatchNorm2d
    return model

def data(step, shape, sizes, rank):
    generator = torch.Generator().manual_seed(step)
    rows = sum(sizes)
    x, y = torch.randn(rows, *shape, generator=generator) * 2 + 1, torch.randn(rows, 3, generator=generator)
    mine = slice(None) if rank is None else slice(sum(sizes[:rank]), sum(sizes[:rank + 1]))
    return x[mine], y[mine]

def train(model, optimizer, steps, shape, sizes, rank):
    seen = []
    for step in range(steps):
        x, y = data(step, shape, sizes, rank)
        optimizer.zero_grad()
        wrong = (model(x) - y).square()
        (wrong.mean() if len(x) else wrong.sum()).backward()
        seen.append(grads(model))
        optimizer.step()
    return seen

session = poseidon.init(timeout=60)
for name, (make, shape) in MODELS.items():
    for kind, sizes in ROWS.items():
        torch.manual_seed(0)
        base = make()
        reference, model = plain(copy.deepcopy(base)), poseidon.sync_batchnorm(copy.deepcopy(base))
        want = train(reference, sgd(reference), 3, shape, sizes, None)
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm="hybrid")
        got = train(model, optimizer, 3, shape, sizes, session.rank)
        for a, b in zip(got, want, strict=True):
            assert_exact(a, b)
        for a, b in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        session.check(model)
        x, _ = data(9, shape, [6, 0, 0], 0)
        torch.testing.assert_close(model.eval()(x), reference.eval()(x), rtol=1e-4, atol=1e-5)
        session.undistribute(model)

# Mixed precision, a checkpointed layer, and a penalty on the gradient of the input.
from torch.utils.checkpoint import checkpoint
sizes = [4, 4, 4]
norm = nn.BatchNorm1d(6)
x, _ = data(0, (6,), sizes, None)
mine = slice(4 * session.rank, 4 * session.rank + 4)
synced = poseidon.sync_batchnorm(copy.deepcopy(norm))
low = synced(x[mine].bfloat16())
assert low.dtype is torch.bfloat16
torch.testing.assert_close(low, norm(x.bfloat16())[mine])
again = checkpoint(synced, x[mine].requires_grad_(), use_reentrant=False)
again.sum().backward()

def penalty(layer, x):
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    slope.square().sum(1).mean().backward()
    return x.grad, layer.weight.grad

synced.zero_grad()
norm.zero_grad()
of_all, weight = penalty(norm, x.detach())
of_mine, part = penalty(synced, x.detach()[mine])
torch.testing.assert_close(of_mine / 3, of_all[mine], rtol=1e-4, atol=1e-6)
parts = torch.tensor(session.gather(part.tolist())).mean(0)
torch.testing.assert_close(parts, weight, rtol=1e-4, atol=1e-6)

# Layers that do not see the rows in front, and DDP's equal weights.
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):  # (T, B, C)
        return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2).relu())

class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, nodes, x):
        owner = torch.repeat_interleave(torch.arange(len(nodes)), nodes)
        sums = torch.zeros(len(nodes), 8).index_add(0, owner, self.norm(self.first(x)).relu())
        return self.last(sums / nodes[:, None])

SIZES = [2, 5, 1]
MINE = slice(sum(SIZES[:session.rank]), sum(SIZES[:session.rank + 1]))

def sequence(model, mine, say=lambda n: None):
    x = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(1))[:, mine]
    loss = model(x).square().mean((0, 2)).mul(1 + x[0, :, 0].abs()).mean()
    say(x.shape[1])
    loss.backward()

def graphs(model, mine, say=None):
    nodes = torch.arange(1, 9)
    x = torch.randn(36, 3, generator=torch.Generator().manual_seed(1))
    owner = torch.repeat_interleave(torch.arange(8), nodes)
    kept = torch.arange(8)[mine]
    model(nodes[mine], x[(owner >= kept[0]) & (owner <= kept[-1])]).square().mean(1).mean().backward()

for make, step in ((Sequence, sequence), (Graphs, graphs)):
    torch.manual_seed(0)
    reference = make()
    model = poseidon.sync_batchnorm(copy.deepcopy(reference))
    step(reference, slice(None))
    session.distribute(model, sgd(model), comm="hybrid")
    step(model, MINE, session.rows)
    assert_exact(grads(model), grads(reference))
    session.undistribute(model)

for comm, options in (("ddp", {}), ("ps", {"rows": "equal"})):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6))
    model = poseidon.sync_batchnorm(copy.deepcopy(reference))
    x, _ = data(0, (6,), SIZES, None)
    (sum(part.pow(3).mean() for part in reference(x).split(SIZES)) / 3).backward()
    session.distribute(model, sgd(model), comm=comm, **options)
    model(x[MINE]).pow(3).mean().backward()
    assert_exact(grads(model), grads(reference))
    session.undistribute(model)

model = poseidon.sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6)))
session.distribute(model, sgd(model), comm="ps")
try:
    with session.join():
        raise AssertionError("join() would leave the layers of a rank without partners")
except poseidon.UserError as error:
    assert "batch-norm" in str(error)
session.barrier()
if session.rank < 2:
    try:
        for _ in range(3):  # one may still find the bytes that the last rank left behind
            model(x)
    except poseidon.PoseidonError as error:
        print("TOLD", error, flush=True)
print("DONE", flush=True)
session.close()
"""


@pytest.mark.timeout(180)
def test_gradients_statistics_and_replicas_equal_one_process(tmp_path: Path) -> None:
    output, ok, reason = run_script(tmp_path, AGAINST_ONE_PROCESS, world_size=3)
    assert ok, f"{reason}\n{output}"
    assert output.count("DONE") == 3
    assert output.count("TOLD") == 2
    assert "every rank must call the same layers" in output


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def test_alone_it_is_the_plain_layer_with_the_same_state() -> None:
    plain = net()
    seen: list[int] = []
    synced = copy.deepcopy(plain)
    hook = synced[1].register_forward_hook(lambda *_: seen.append(1))
    parameters = [id(p) for p in synced.parameters()]
    assert poseidon.sync_batchnorm(synced) is synced
    assert [id(p) for p in synced.parameters()] == parameters
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(synced(x), plain(x))
    assert seen == [1]
    hook.remove()
    assert list(synced.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(pickle.loads(pickle.dumps(copy.deepcopy(synced))).state_dict())
    assert torch.equal(synced.eval()(x), plain.eval()(x))


def test_a_root_that_is_a_batch_norm_and_a_second_call() -> None:
    layer = nn.BatchNorm1d(3)
    assert poseidon.sync_batchnorm(poseidon.sync_batchnorm(layer)) is layer
    assert torch.equal(layer(torch.ones(2, 3)), torch.zeros(2, 3))


def test_what_it_cannot_convert_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with caplog.at_level(logging.WARNING, "poseidon"):
        model = poseidon.sync_batchnorm(nn.Sequential(Own(4)))
    assert type(model[0]) is Own
    assert "batch-norm 0 is a Own" in caplog.text
    with pytest.raises(UserError, match=r"batch-norm 0 has no shape yet"):
        poseidon.sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))
