"""``trainer.trace``: what each rank's file tells, and that nothing is recorded without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from poseidon import cli
from poseidon.api import Session
from poseidon.config.schema import Comm
from poseidon.engine.device import Host
from poseidon.engine.syncers import Syncers
from poseidon.errors import UserError
from poseidon.reporting.transfers import transfers
from poseidon.tracing import Event, Row, read
from poseidon.training.loop import Trainer
from poseidon.training.parts import Parts
from tests.ranks import run_ranks

from .conftest import make_config
from .test_emulated import ROWS, SECONDS, run


def traced(folder: Path, ranks: int) -> dict[int, list[Event]]:
    return {rank: read(folder / "trace" / f"rank{rank}.json")[1] for rank in range(ranks)}


def of(events: list[Event], row: Row) -> list[Event]:
    return [event for event in events if event.row is row]


@pytest.mark.parametrize("comm", ["ps", "sfb", "block"])
def test_an_emulated_device_s_rows_are_its_own_timeline(tmp_path: Path, comm: str) -> None:
    run(tmp_path, 2, f"comm={comm}", "trainer.trace=[3,4]", "hardware.host_copy=1e9", "hardware.server_sum=1e9")
    about, _ = read(tmp_path / "trace" / "rank1.json")
    assert (about["rank"], about["comm"], about["iterations"]) == (1, comm, [3, 4])
    for events in traced(tmp_path, 2).values():
        assert [event.name for event in of(events, Row.iteration)] == ["iteration 3", "iteration 4"]
        device = of(events, Row.device)
        passes = Counter(event.details["pass"] for event in device)
        assert passes["forward"] == passes["backward"] == 2 * 4  # lenet's layers that train
        products = sum(event.end - event.start for event in device if event.details["pass"] == "reconstruct")
        assert (products > 0) == (comm == "sfb")
        spent = sum(event.end - event.start for event in device if event.details["pass"] in ("forward", "backward"))
        saved = products / 2 if comm == "sfb" else spent * 2  # a node's own part of two nodes' products; unknown
        assert 2 * SECONDS - saved - 1e-4 < spent < 2 * SECONDS + 1e-4
        assert all(one.end <= other.start + 2e-7 for one, other in pairwise(device))
        assert {event.details["kind"] for event in of(events, Row.copy_out)} == {"Conv2d", "Linear"}
        assert of(events, Row.aggregate)
        assert of(events, Row.wait)


def test_messages_have_bytes_peer_layer_scheme_and_round_on_both_ends(tmp_path: Path) -> None:
    result = run(tmp_path, 3, "comm=ps", "trainer.trace=[2,3,4]")[0]
    # A rank may be ahead of another by part of an iteration: of the middle one, all is on both ends.
    ranks = {rank: [e for e in events if e.details.get("round") == 2] for rank, events in traced(tmp_path, 3).items()}
    sent = sum(event.details["bytes"] for event in of(ranks[0], Row.send))
    assert sent == pytest.approx(result["bytes_planned_per_iteration"][0], rel=0.01)
    first = of(ranks[0], Row.send)[0]
    assert first.details["scheme"] == "ps"
    assert first.details["round"] == 2
    assert first.details["layer"]
    assert first.details["content"] in ("push", "pull")
    found = transfers(ranks)
    both = {(t.sender, t.receiver) for t in found}
    assert both == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(t.start <= t.end for t in found)
    ids = Counter(t.message for t in found)
    assert set(ids.values()) == {1}
    assert set(ids) == {str(event.details["message"]) for events in ranks.values() for event in of(events, Row.send)}


@pytest.mark.parametrize("comm", [Comm.ps, Comm.sfb])
def test_real_layers_products_and_sums(tmp_path: Path, make_parts: Callable[..., Parts], comm: Comm) -> None:
    config = make_config(comm, iterations=4, epochs=None, trace=[3], eval_every=0)
    store = dist.HashStore()

    def body(session: Session) -> None:
        session._store = store
        trainer = Trainer(session, make_parts(), config)
        trainer.run()
        assert trainer.tracing is not None
        trainer.tracing.save(tmp_path)

    run_ranks(2, body)
    ranks = traced(tmp_path, 2)
    for events in ranks.values():
        names = [event.name for event in of(events, Row.device)]
        for layer in ("0", "1", "2", "3"):
            assert {f"forward {layer}", f"backward {layer}"} <= set(names)
        assert names[-1] == "optimizer step"
        assert ("reconstruct 0" in names) == (comm is Comm.sfb)
        assert of(events, Row.wait)
    assert of(ranks[0] + ranks[1], Row.aggregate)  # of what is small, there is one server


def test_nothing_stands_on_any_path_without(make_parts: Callable[..., Parts]) -> None:
    config = make_config(iterations=2, epochs=None, eval_every=0)
    store = dist.HashStore()

    def body(session: Session) -> tuple[Any, ...]:
        session._store = store
        parts = make_parts()
        trainer = Trainer(session, parts, config)
        trainer.run()
        sync: Any = session._models[0].sync
        hooks = len(parts.optimizer._optimizer_step_pre_hooks) + len(parts.optimizer._optimizer_step_post_hooks)
        return trainer.tracing, type(sync.plan.syncers), type(sync._device), hooks

    assert run_ranks(2, body) == [(None, Syncers, Host, 0)] * 2


def test_an_iteration_that_the_data_do_not_last_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.trace=\[9\]: there is no iteration 9, this run makes 1 to 3"):
        run(
            tmp_path,
            1,
            "comm=ps",
            f"dataset.size={3 * ROWS}",
            "trainer.iterations=null",
            "trainer.epochs=1",
            "trainer.trace=[9]",
        )


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["ddp", "fsdp"])
@pytest.mark.parametrize("emulated", [False, True])
def test_pytorch_s_own(tmp_path: Path, comm: str, emulated: bool) -> None:
    more = ["hardware=titan_x", "+hardware.iterations={lenet: {batch_size: 32, seconds: 0.05}}"] if emulated else []
    overrides = [f"comm={comm}", "trainer.epochs=null", "trainer.iterations=4", "trainer.trace=[3]", *more]
    assert cli.main(["train", *overrides, "tracking.mlflow=false", f"hydra.run.dir={tmp_path}/run"]) == 0
    for events in traced(tmp_path / "run", 2).values():
        collectives = of(events, Row.collective)
        assert collectives
        assert all(event.details["bytes"] > 0 and event.end > event.start for event in collectives)
        passes = Counter(event.details.get("pass") for event in of(events, Row.device))
        assert passes["forward"] >= 4
        assert passes["backward"] >= 3
        assert passes["optimizer step"] == 1
        assert of(events, Row.wait)
    assert cli.main(["trace", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "trace" / "timeline.png").stat().st_size > 10_000
