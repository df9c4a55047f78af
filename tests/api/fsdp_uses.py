"""What else a script does with models under comm=fsdp, beside one process; run by the ranks of test_fsdp.py."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poseidon
from poseidon.api import Session
from poseidon.engine import Host
from poseidon.errors import UserError
from tests.engine.nets import batch, build, sgd, share

Use = Callable[[Session], None]
FSDP: dict[str, Any] = {"comm": "fsdp", "merge_bytes": 512}


class Pair:
    """A model under comm=fsdp on this rank's rows, and its double on all rows."""

    def __init__(self, name: str, session: Session, optimizer: Callable[[nn.Module], Any] = sgd) -> None:
        self.session = session
        self.models = build(name), build(name)
        self.optimizers = [optimizer(model) for model in self.models]
        self.mine = self.models[0]

    def steps(self, numbers: range, after: Callable[[nn.Module], object] = lambda model: None) -> None:
        sizes = [12 // self.session.world_size] * self.session.world_size
        for number in numbers:
            whole = batch(number, 12)
            for rows, model, optimizer in zip(
                (share(whole, self.session.rank, sizes), whole), self.models, self.optimizers, strict=True
            ):
                optimizer.zero_grad()
                F.cross_entropy(model(rows[0]), rows[1]).backward()
                optimizer.step()
                after(model)

    def assert_equal(self) -> None:
        self.session.synchronize()
        close(*(model.state_dict() for model in self.models))
        close(*(optimizer.state_dict()["state"] for optimizer in self.optimizers))
        settings = [[{**group, "params": 0} for group in optimizer.param_groups] for optimizer in self.optimizers]
        assert settings[0] == settings[1]


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(dict(got), dict(want), rtol=1e-4, atol=1e-5)


def synchronised_batch_norm(session: Session) -> None:
    pair = Pair("batchnorm", session)
    poseidon.sync_batchnorm(pair.mine)
    session.distribute(pair.mine, pair.optimizers[0], **FSDP)
    pair.steps(range(3))
    pair.assert_equal()


def groups_schedules_and_two_models(session: Session) -> None:
    def grouped(model: Any) -> torch.optim.Optimizer:
        rest = [*model[2].parameters(), *model[4].parameters()]
        groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": rest, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=1e-3)

    pairs = Pair("mlp", session, grouped), Pair("lenet", session)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in pairs[0].optimizers]
    for pair in pairs:
        session.distribute(pair.mine, pair.optimizers[0], **FSDP)
    for number in range(3):
        for pair in pairs:
            pair.steps(range(number, number + 1))
        for schedule in schedules:
            schedule.step()
    for pair in pairs:
        pair.assert_equal()


def one_comm_after_another(session: Session) -> None:
    pair = Pair("lenet", session)
    for number, comm in enumerate(("fsdp", "ddp", "fsdp", "hybrid", "fsdp")):
        session.distribute(pair.mine, pair.optimizers[0], **{**FSDP, "comm": comm})
        pair.steps(range(number, number + 2))
        session.undistribute(pair.mine)
    pair.assert_equal()


def loaded_later(session: Session) -> None:
    pair, saved = Pair("lenet", session), Pair("lenet", session)
    pair.optimizers = [torch.optim.Adam(model.parameters()) for model in pair.models]
    saved.optimizers = [torch.optim.Adam(model.parameters()) for model in saved.models]
    for model, optimizer in zip(saved.models, saved.optimizers, strict=True):
        F.cross_entropy(model(batch(9, 12)[0]), batch(9, 12)[1]).backward()
        optimizer.step()
    session.distribute(pair.mine, pair.optimizers[0], **FSDP)
    pair.steps(range(2))
    for read in (pair.mine.state_dict, pair.optimizers[0].state_dict):
        refused(lambda read=read: read(), "call session.synchronize() on all ranks before state_dict()")
    for ours, theirs in zip((*pair.models, *pair.optimizers), (*saved.models, *saved.optimizers), strict=True):
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    pair.steps(range(2, 4))
    pair.assert_equal()
    pair.mine.load_state_dict(saved.mine.state_dict())  # while the parameters are whole
    session.synchronize()
    close(pair.mine.state_dict(), saved.mine.state_dict())


def frozen_for_a_while(session: Session) -> None:
    pair = Pair("lenet", session)
    session.distribute(pair.mine, pair.optimizers[0], **FSDP)

    def change(model: Any) -> None:
        model[1].weight.requires_grad_(not model[1].weight.requires_grad)
        with torch.no_grad():
            model(batch(7, 4)[0])  # an evaluation by all ranks

    pair.steps(range(4), change)
    pair.assert_equal()
    for model in pair.models:
        model[5].weight.requires_grad_(False)  # type: ignore[index]  # while the parameters are whole
    pair.steps(range(4, 6))
    pair.assert_equal()


def nothing_to_train(session: Session) -> None:
    model = build("batchnorm").requires_grad_(False)
    session.distribute(model, sgd(build("mlp")), **FSDP)
    session.check(model)
    session.synchronize()
    assert session.report(model)["bytes_sent_per_iteration"] == 0
    session.undistribute(model)


def other_models_and_calls(session: Session) -> None:
    wide = nn.Linear(4, 4 + session.rank)
    refused(lambda: session.distribute(wide, sgd(wide), **FSDP), "ranks differ: parameter weight [4, 4]")
    number = nn.Module()
    number.scale = nn.Parameter(torch.tensor(1.0))
    refused(lambda: session.distribute(number, sgd(number), **FSDP), "parameter scale is a single number")
    model = build("mlp")
    session.distribute(model, sgd(model), **FSDP)
    refused(lambda: session.join().__enter__(), "comm='fsdp': take ps, sfb or hybrid")
    schemes = session.report(model)["schemes"]
    assert schemes == dict.fromkeys(("0", "2", "4"), "fsdp")
    session.undistribute(model)


class Emulated(Host):
    """Counts the bytes that an emulated accelerator would take time for; its copies to the host end in another thread,
    and late."""

    has_values = False

    def __init__(self) -> None:
        self.bytes = {"to host": 0, "summed": 0, "to device": 0}
        self._engine = ThreadPoolExecutor(1)

    def to_host(self, value: Any, nbytes: int, then: Callable[[Any], None]) -> None:
        self.bytes["to host"] += nbytes
        self._engine.submit(then, value)

    def summed(self, nbytes: int, then: Callable[[], None], post: Any) -> None:
        self.bytes["summed"] += nbytes
        then()

    def to_device(self, value: Any, nbytes: int, then: Callable[[Any], None]) -> None:
        self.bytes["to device"] += nbytes
        then(value)


def on_an_emulated_accelerator(session: Session) -> None:
    """Copies and sums are those of a host; no rank's values go to another at start."""
    n, rank = session.world_size, session.rank
    model = nn.Sequential(nn.Linear(12, 120, bias=False), nn.Linear(120, 12, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)
    optimizer = sgd(model)
    session.accelerator = emulated = Emulated()
    session.distribute(model, optimizer, **FSDP)
    assert all(bool((p.to_local() == rank).all()) for p in model.parameters())  # type: ignore[attr-defined]
    optimizer.zero_grad()
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    whole = 4 * 2 * 12 * 120
    part = whole // n
    assert emulated.bytes == {"to host": part + whole, "summed": whole - part, "to device": whole - part + part}
    session.undistribute(model)
    session.accelerator = Host()


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        call()


def closed(session: Session) -> None:
    """The last use: whole parameters stay, in a plain model; others say what to do."""
    pair, cut = Pair("lenet", session), Pair("mlp", session)
    for each in (pair, cut):
        session.distribute(each.mine, each.optimizers[0], **FSDP)
        each.steps(range(2))
    pair.assert_equal()
    cut.steps(range(2, 3))
    session.close()
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(batch(9, 12)[0]), batch(9, 12)[1]).backward()
        optimizer.step()
    close(*(model.state_dict() for model in pair.models))
    refused(lambda: cut.mine(batch(9, 12)[0]), "session.undistribute(model) before that")


USES: tuple[Use, ...] = (
    synchronised_batch_norm,
    groups_schedules_and_two_models,
    one_comm_after_another,
    loaded_later,
    frozen_for_a_while,
    nothing_to_train,
    other_models_and_calls,
    on_an_emulated_accelerator,
    closed,
)


def check_all(session: Session) -> None:
    for use in USES:
        try:
            use(session)
        except Exception as error:
            raise AssertionError(f"{use.__name__}: {error}") from error
    if session.rank == 0:
        print("FINE", len(USES), flush=True)
