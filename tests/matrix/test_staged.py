"""Gradients made on a device with memory of its own: what is computed is one process's, wherever copies come late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.engine import start
from poseidon.errors import PoseidonError, UserError
from tests.copies import LateCopies, NoCopies
from tests.matrix import test_embeddings, test_layers, test_structure, test_techniques
from tests.matrix.harness import Case, assert_equals_one_process, build, images, on_ranks, vectors
from tests.ranks import run_ranks

COMMS = ["ps", "sfb", "hybrid", "block", "project_adam"]
CASES = {
    f"{module.__name__.rpartition('_')[2]}: {name}": case
    for module in (test_structure, test_layers, test_embeddings, test_techniques)
    for name, case in module.CASES.items()
}
#: One or two of each thing that moves otherwise than others.
FAST = ["structure: never used", "structure: tied embedding and head", "techniques: accumulation, no_sync"]


def check(case: Case, comm: str, sizes: list[int], devices: list[int] | None = None) -> None:
    assert_equals_one_process(case, comm, sizes, devices or [], copies=LateCopies)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_equals_one_process(name: str, comm: str) -> None:
    check(CASES[name], comm, [2, 4, 3])


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("devices", [[], [2, 2], [1, 3]], ids=str)
def test_devices_of_a_node_and_one_without_rows(comm: str, devices: list[int]) -> None:
    check(mlp(), comm, [2, 3, 0, 2], devices)


@pytest.mark.parametrize("comm", ["ps", "block", "project_adam"])
def test_servers_apart(comm: str) -> None:
    assert_equals_one_process(mlp(), comm, [2, 3], servers=1, copies=LateCopies)


def mlp() -> Case:
    return Case(lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 3)), vectors(64))


def autocast(model: nn.Module, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*inputs).square().mean(1)
    (loss * number).mean().backward()


def image_net() -> nn.Module:
    head = nn.Linear(8 * 36, 64, bias=False)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), head)
    return net.to(memory_format=torch.channels_last)


NARROW = {
    "bf16": Case(lambda: mlp().model().bfloat16(), lambda g, n: (torch.randn(n, 64, generator=g).bfloat16(),)),
    "autocast": Case(mlp().model, vectors(64), step=autocast),
    "convolutions": Case(image_net, images(3, 8, 8), options={"merge_bytes": 400}),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("name", NARROW)
def test_bits_are_those_of_a_host(name: str, comm: str) -> None:
    case = NARROW[name]
    base = build(case)
    runs = [on_ranks(case, base, comm, [5, 3], copies=copies) for copies in (None, LateCopies)]
    for (want, report), (got, its) in zip(*runs, strict=True):
        assert report["plan"] == its["plan"]
        for first, second in zip(want, got, strict=True):
            for a, b in zip(first, second, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


# --- what waits for nothing ----------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Layers whose gradients move in all ways: merged, in pairs, as factors, as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.body = nn.Sequential(nn.Conv1d(8, 32, 3), nn.BatchNorm1d(32), nn.ReLU(), nn.Flatten(), nn.Linear(64, 96))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(96, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids).transpose(1, 2)))


@pytest.mark.parametrize("devices", [[], [2]], ids=["nodes", "one node"])
@pytest.mark.parametrize("comm", COMMS)
def test_nothing_looks_at_the_device(comm: str, devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensors have no values, looking at one raises; and so does mixing what is on the device with what is not.
    Copies to it show nothing: PyTorch lets them pass."""
    monkeypatch.setattr(start, "_probe", lambda where: "")

    def body(session: Session) -> list[str]:
        model = Everything().to("meta")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.distribute(model, optimizer, comm=comm, merge_bytes=2048)  # type: ignore[arg-type]
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.zeros(4, 4, dtype=torch.int64, device="meta")).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"meta"}
            optimizer.step()
        return [unit.scheme for unit in session._engines()[0].plan.book.units]

    schemes = run_ranks(2, body, copies=NoCopies, devices=devices)
    assert schemes[0] == schemes[1]
    assert {"rows", {"ps": "rows", "block": "block", "project_adam": "adam"}.get(comm, "sfb")} <= set(schemes[0])


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["down", "up"])
def test_copies_that_fail_end_the_run_for_everyone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(session: Session) -> str:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="ps")
        if session.rank:
            monkeypatch.setattr(session.accelerator._copies, way, lambda: Broken())  # type: ignore[attr-defined]
        with pytest.raises(PoseidonError) as caught:
            model(torch.ones(2, 64)).sum().backward()
        return str(caught.value)

    class Broken:
        def add(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        def end(self) -> None:
            if way == "up":
                raise RuntimeError("an illegal memory access")

        def finish(self) -> None:
            raise RuntimeError("an illegal memory access")

    for text in run_ranks(2, body, copies=LateCopies):
        assert text == "rank 1: copies between the device and its host failed: RuntimeError: an illegal memory access"


def test_a_model_on_the_cpu_is_trained_there() -> None:
    def body(session: Session) -> str:
        session._staged = session.accelerator  # type: ignore[assignment]
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return session.digest(model)

    assert len(set(run_ranks(2, body, copies=NoCopies))) == 1


def test_a_model_elsewhere_is_refused() -> None:
    def body(session: Session) -> None:
        model = nn.Linear(2, 2, device="meta")
        with pytest.raises(UserError, match=r"parameter weight is on meta, but this session's device is cpu: call"):
            session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

    run_ranks(2, body)
