"""Our own comms on whatever device a session has, against one process on the same one; run by every rank of a job."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from poseidon.api import Session
from tests.matrix import test_embeddings, test_layers, test_structure, test_techniques
from tests.matrix.harness import Case, build, gradients, images, share, vectors

SIZES = [5, 3]
COMMS = ("ps", "sfb", "hybrid", "block", "project_adam")


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(inplace=True), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))


def convolutions() -> nn.Module:
    head = [nn.Flatten(), nn.Linear(8 * 36, 64, bias=False), nn.ReLU(), nn.Linear(64, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), *head).to(memory_format=torch.channels_last)


def narrow(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    with torch.autocast(number.device.type, torch.bfloat16):
        rows = model(*inputs).square().mean(1)
    (rows * number).mean().backward()


def zeroed(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    (model(*inputs).square().mean(1) * number).mean().backward()


def on_another_stream(model: Any, optimizer: Any, inputs: Any, number: torch.Tensor, session: Any) -> None:
    """Than the one on which the model was distributed, and on which the optimizer steps."""
    with other_stream(number.device):
        (model(*inputs).square().mean(1) * number).mean().backward()


@contextlib.contextmanager
def other_stream(device: torch.device) -> Any:
    if device.type != "cuda":
        yield
        return
    usual, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    other.wait_stream(usual)
    with torch.cuda.stream(other):
        yield
    usual.wait_stream(other)


CASES = {
    "wide": Case(wide, vectors(64)),
    "cut": Case(wide, vectors(64), options={"kv_bytes": 4096, "merge_bytes": 256}),
    "after the backward pass": Case(wide, vectors(64), options={"overlap": "none"}),
    "convolutions": Case(convolutions, images(3, 8, 8)),
    "zeroed": Case(wide, vectors(64), step=zeroed),
    "another stream": Case(wide, vectors(64), step=on_another_stream),
    **{name: test_structure.CASES[name] for name in ("never used", "layer called twice", "weight also used directly")},
    **{name: test_structure.CASES[name] for name in ("tied embedding and head", "two forwards", "two backwards")},
    **{name: test_layers.CASES[name] for name in ("embedding", "embedding, sparse", "embedding bag", "lstm")},
    **{f"embedding {name}": test_embeddings.CASES[name] for name in ("by frequency", "twice", "no_sync")},
    **{name: test_techniques.CASES[name] for name in ("accumulation, no_sync", "clip by norm", "checkpoint")},
    "checkpoint, reentrant": test_techniques.CASES["checkpoint, reentrant"],
}
#: One process on the rows of both ranks rounds otherwise: replicas are compared, and roughly the values.
NARROW = {"autocast": Case(wide, vectors(64), step=narrow)}


def on(device: torch.device, case: Case) -> Case:
    """The same with its inputs there."""
    make = case.inputs
    return replace(case, inputs=lambda generator, rows: tuple(t.to(device) for t in make(generator, rows)))


def check(session: Session, case: Case, comm: str, tolerance: float) -> None:
    case, device = on(session.device, case), session.device
    base = build(case)
    alone, model = copy.deepcopy(base).to(device), copy.deepcopy(base).to(device)
    before, optimizer = case.optimizer(alone), case.optimizer(model)
    session.distribute(model, optimizer, comm=comm, **case.options)  # type: ignore[arg-type]
    for number in range(case.steps):
        inputs, factor = case.data(number, sum(SIZES))
        data = inputs, factor.to(device)
        want = gradients(case, alone, before, *data, None)
        got = gradients(case, model, optimizer, *share(data, session.rank, SIZES), session)
        largest = max(float(w.abs().max()) for w in want if w is not None)
        for name, w, g in zip([n for n, _ in model.named_parameters()], want, got, strict=True):
            assert (w is None) == (g is None), f"step {number}, {name}: {w is None}, {g is None}"
            if w is not None and g is not None:
                worst = float((g - w).abs().max())
                assert worst <= tolerance * (float(w.abs().max()) + 0.01 * largest), f"step {number}, {name}: {worst}"
    session.check(model)
    session.undistribute(model)


def carries_state(session: Session) -> None:
    """Of an optimizer that has stepped before; rank 0's wins, step counts included."""
    torch.manual_seed(session.rank)
    model = wide().to(session.device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(1 + session.rank):
        model(torch.ones(3, 64, device=session.device)).sum().backward()
        optimizer.step()
    session.distribute(model, optimizer)
    states = list(optimizer.state.values())
    assert {float(state["step"]) for state in states} == {1.0}
    moments = [(f"{key} {i}", s[key]) for i, s in enumerate(states) for key in ("exp_avg", "exp_avg_sq")]
    assert {t.device for _, t in moments} == {session.device}
    sums = session.gather([float(t.double().sum()) for _, t in moments])
    assert sums[0] == sums[1]
    session.check(model)
    session.undistribute(model)


def waits_for_nothing(session: Session, comm: str) -> None:
    """From the third step on, in which all buffers are there: a call that waits for the device raises."""
    model = convolutions().to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
    x = torch.ones(4, 3, 8, 8, device=session.device)
    for number in range(6):
        if number >= 3 and session.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            if session.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    session.check(model)
    session.undistribute(model)


def check_all(session: Session) -> None:
    torch.backends.cudnn.allow_tf32 = False  # of which convolutions would use less than they compare to
    uses = 0
    for tolerance, cases in ((1e-4, CASES), (0.1, NARROW)):
        for name, case in cases.items():
            for comm in COMMS:
                try:
                    check(session, case, comm, tolerance)
                except Exception as error:
                    raise AssertionError(f"{name}, {comm}: {error}") from error
                uses += 1
    for comm in COMMS:
        waits_for_nothing(session, comm)
    carries_state(session)
    if session.rank == 0:
        print("SAME", uses, "on", session.device.type, flush=True)
