"""torchvision's architectures: one step's gradients on two ranks against those of PyTorch's DDP.

DDP's gradient is the mean of the ranks' local gradients; real DDP in real processes shows that once, for two
networks with batch norm, dropout and layers that are skipped at random, all of which are local in both.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from poseidon.api import Session
from tests.engine.nets import assert_exact, grads
from tests.matrix import zoo
from tests.ranks import run_ranks

RANKS = 2
SEED = 7
#: In the default run, about one per family of those that take less than three seconds; all others are slow.
FAMILIES = [
    "deeplabv3_mobilenet_v3_large",
    "densenet121",
    "efficientnet_b0",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "googlenet",
    "lraspp_mobilenet_v3_large",
    "mc3_18",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "quantized_mobilenet_v2",
    "raft_small",
    "regnet_y_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
]
LARGE = 25_000_000  # parameters
#: Torch's generator, which dropout draws from, is one for all threads.
RANDOM = threading.Lock()
Grads = list[torch.Tensor | None]


def backward(recipe: zoo.Recipe, model: nn.Module, rank: int) -> None:
    """One rank's share of the step: its own images and its own noise."""
    batch = recipe.batch(torch.Generator().manual_seed(SEED + rank))
    with RANDOM:
        torch.manual_seed(SEED + rank)
        loss = recipe.loss(model, batch)
    loss.backward()


def build(recipe: zoo.Recipe) -> nn.Module:
    torch.manual_seed(SEED)
    return recipe.make().train()


def mean_of_local(recipe: zoo.Recipe, model: nn.Module) -> Grads:
    """What DDP gives: a parameter that one rank has no gradient of counts as zero there."""
    total: Grads = [None for _ in model.parameters()]
    for rank in range(RANKS):
        model.zero_grad()
        backward(recipe, model, rank)
        for index, grad in enumerate(grads(model)):
            before = total[index]
            total[index] = before if grad is None else grad if before is None else before + grad
    return [grad if grad is None else grad / RANKS for grad in total]


def two_ranks(recipe: zoo.Recipe, base: nn.Module, comm: str) -> list[tuple[list[Grads], dict[str, str]]]:
    """Of each rank: the gradients of iteration 0 and of the one after it, which follows the plan; the schemes."""

    def body(session: Session) -> tuple[list[Grads], dict[str, str]]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            backward(recipe, model, session.rank)
            optimizer.step()
            seen.append([p.grad for p in model.parameters()])
        return seen, session.report(model)["schemes"]

    return run_ranks(RANKS, body, timeout=100.0, limit=110.0)


def assert_equals_ddp(name: str, comm: str) -> None:
    recipe = zoo.recipe(name)
    base = build(recipe)
    ranks = two_ranks(recipe, base, comm)
    want = mean_of_local(recipe, base)
    for seen, _ in ranks:
        for got in seen:
            assert_exact(got, want)
    for one, other in zip(*(seen for seen, _ in ranks), strict=True):
        for a, b in zip(one, other, strict=True):
            assert a is b or torch.equal(a, b), "ranks differ"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_hybrid_equals_ddp(name: str) -> None:
    assert_equals_ddp(name, "hybrid")


@pytest.mark.parametrize("comm", ["ps", "sfb"])
@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_one_scheme_equals_ddp(name: str, comm: str) -> None:
    assert_equals_ddp(name, comm)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.names() if name not in FAMILIES])
def test_every_other_architecture_equals_ddp(name: str) -> None:
    """Networks of over 25 M parameters, a quarter of an hour, with POSEIDON_WHOLE_ZOO=1."""
    if zoo.size(name) > LARGE and os.environ.get("POSEIDON_WHOLE_ZOO") != "1":
        pytest.skip("over 25 M parameters: POSEIDON_WHOLE_ZOO=1")
    assert_equals_ddp(name, "hybrid")


def test_nothing_is_left_out_unsaid() -> None:
    """Architectures of another torchvision than this was written with come up by themselves."""
    assert set(FAMILIES) <= set(zoo.names())
    for name, reason in zoo.SKIPPED.items():
        print(f"skipped: {name}: {reason}")
    for name in zoo.LARGER:
        assert zoo.size(name) > zoo.LIMIT, name


def _ddp(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    result: dict[str, Any] = {}
    for name in names:
        recipe = zoo.recipe(name)
        model = build(recipe)
        backward(recipe, DistributedDataParallel(model), rank)
        result[name] = grads(model)
    if rank == 0:
        torch.save(result, f"{folder}/gradients")
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_mean_of_local_gradients_is_what_ddp_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["mobilenet_v3_small", "swin_t"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    processes = multiprocessing.spawn(_ddp, (str(tmp_path), names), RANKS, join=False)
    deadline = time.monotonic() + 100
    while not processes.join(timeout=deadline - time.monotonic(), grace_period=5):
        assert time.monotonic() < deadline
    by_ddp = torch.load(tmp_path / "gradients")
    for name in names:
        recipe = zoo.recipe(name)
        assert_exact(by_ddp[name], mean_of_local(recipe, build(recipe)))
