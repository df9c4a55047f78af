"""Trainings on emulated accelerators, from a config: nothing learnt, and times as the profile says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from poseidon.api import Session
from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.config.spec import Spec, to_plain
from poseidon.tracking import summary as summaries
from poseidon.training.emulated import session_of_one
from poseidon.training.job import describe
from poseidon.training.plan import make_plan
from poseidon.training.result import limits
from poseidon.training.worker import train
from tests.ranks import run_ranks

SECONDS, ROWS = 0.03, 8
EMULATED = [
    "model=lenet",
    "dataset=synthetic",
    "dataset.size=100",
    f"trainer.batch_size={ROWS}",
    "trainer.epochs=null",
    "trainer.iterations=5",
    "trainer.log_every=1",
    "hardware=titan_x",
    f"+hardware.iterations={{lenet: {{batch_size: {ROWS}, seconds: {SECONDS}}}}}",
]


def spec(folder: Path, *overrides: str) -> Spec:
    config = compose("train", [*EMULATED, *overrides])
    return Spec(config, [], str(folder), to_plain(config))


def run(folder: Path, ranks: int, *overrides: str, devices: Sequence[int] = ()) -> list[dict[str, Any]]:
    given = spec(folder, *overrides)
    store = dist.HashStore()

    def body(session: Session) -> dict[str, Any]:
        session._store = store
        return train(session, given)

    return run_ranks(ranks, body, devices=devices)


@pytest.mark.parametrize("comm", ["ps", "sfb"])
def test_devices_of_a_node_send_what_is_planned(tmp_path: Path, comm: str) -> None:
    result = run(tmp_path, 4, f"comm={comm}", "cluster.devices_per_node=2", devices=[2, 2])[0]
    for what in ("dense", "inside"):
        planned = result["bytes_inside_planned_per_iteration" if what == "inside" else "bytes_planned_per_iteration"]
        assert len(planned) == 2
        assert result[f"bytes_{what}_per_iteration"] == pytest.approx(planned)


@pytest.mark.parametrize("comm", ["ps", "hybrid", "block", "project_adam", "downpour"])
def test_has_speeds_and_bytes_but_nothing_that_needs_values(tmp_path: Path, comm: str) -> None:
    result = run(tmp_path, 2, f"comm={comm}")[0]
    assert result["replica_digests"] == [None, None]
    assert (result["train_loss"], result["eval_accuracy"], result["eval_loss"]) == (None, None, None)
    assert result["iteration_seconds"]["median"] >= SECONDS
    assert result["bytes_dense_per_iteration"] == result["bytes_planned_per_iteration"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "plan.json", "result.json"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["train_loss"] for line in lines} == {None}


def test_schemes_by_predicted_time_are_the_planned_ones(tmp_path: Path) -> None:
    given = ["comm.rule=time", "cluster=emulated", "cluster.nodes=2", "cluster.bandwidth=100mbit"]
    result = run(tmp_path, 2, *given)[0]
    fast = [*given[:3], "cluster.bandwidth=400gbit"]
    slow, fast = (
        {row.layer: row.scheme for row in make_plan(compose("plan", [*EMULATED, *options])).rows}
        for options in (given, fast)
    )
    assert result["schemes"] == {layer: slow[layer] for layer in result["schemes"]}
    assert (slow["ip1"], fast["ip1"]) == ("sfb", "block")  # which leaves the multiplying to hosts


def test_times_are_told_undilated(tmp_path: Path) -> None:
    """At f = 5 each iteration lasts five times as long, and the record says what it would have been."""
    result = run(tmp_path, 1, "comm=single", "cluster=emulated", "cluster.time_dilation=5.0")[0]
    assert SECONDS <= result["iteration_seconds"]["median"] < 2 * SECONDS
    assert result["images_per_second"] == pytest.approx(ROWS / result["iteration_seconds"]["median"])
    assert SECONDS * 5 <= result["train_seconds"] < SECONDS * 10


def test_the_record_says_how_long_each_part_works(tmp_path: Path) -> None:
    """Undilated; no iteration can be shorter. By PS a node copies, and adds up, as many bytes as its gradients have."""
    ps, hybrid = (
        run(tmp_path, 2, f"comm={comm}", "cluster.time_dilation=2.0")[0]["emulated_busy_seconds"]
        for comm in ("ps", "hybrid")
    )
    config = compose("train", EMULATED)
    assert config.hardware is not None
    model: Any = build(config.model, key="model")
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    assert ps["device"] == pytest.approx(SECONDS)
    assert ps["host_copy"] == pytest.approx(nbytes / (config.hardware.host_copy or 0), rel=1e-3)
    assert ps["server_sum"] == pytest.approx(nbytes / (config.hardware.server_sum or 0), rel=0.1)  # shards are uneven
    assert hybrid["device"] > SECONDS  # factors of two nodes to multiply
    assert hybrid["host_copy"] < ps["host_copy"] / 5


def test_who_has_more_rows_takes_longer(tmp_path: Path) -> None:
    """A profile's time is of `batch_size` rows, the mean of the nodes; each node copies factors of its own rows."""
    result = run(tmp_path, 2, "comm=sfb", "cluster.batch_shares=[1,3]")[0]
    assert result["emulated_busy_seconds"]["device"] > 1.5 * SECONDS
    assert result["images_per_second"] == pytest.approx(2 * ROWS / result["iteration_seconds"]["median"])
    first, second = result["bytes_dense_per_iteration"]
    assert second - first == pytest.approx((12 - 4) * 4 * (800 + 500 + 500 + 10), rel=0.01)  # of two linear layers


def test_a_batch_in_pieces_takes_no_longer(tmp_path: Path) -> None:
    result = run(tmp_path, 1, "comm=single", "trainer.accumulate=4")[0]
    assert SECONDS <= result["iteration_seconds"]["median"] < 1.5 * SECONDS


def test_one_node_pays_for_its_host_under_our_schemes_only(tmp_path: Path) -> None:
    schemes = {}
    for comm in ("single", "ddp", "ps", "hybrid"):
        given = spec(tmp_path, f"comm={comm}", "cluster.nodes=1", "trainer.iterations=2")
        with session_of_one(given.config, 20.0) as session:
            schemes[comm] = train(session, given)["schemes"]
    assert set(schemes["single"].values()) == {"none"}
    assert set(schemes["ps"].values()) == {"ps"}
    assert "sfb" in schemes["hybrid"].values()


def test_the_record_says_what_is_emulated() -> None:
    summary = summaries.begin(compose("train", EMULATED), [])
    assert summary["degree"] == "emulated"
    assert summary["hardware"] == "titan_x"
    assert {"layers", "host_copy", "server_sum"} <= set(summary["emulated_costs"])
    real = summaries.begin(compose("train", EMULATED[:2]), [])
    assert (real["degree"], real["hardware"], real["emulated_costs"]) == ("real", None, [])


def test_software_is_held_against_undilated_iterations() -> None:
    found = limits(seconds=0.5, cpu=1.0, thread=0.4, sent=1e8, busy=0.95)
    assert found["engine_bound"]
    assert found["cpu_bound"]
    assert found["engine_limit_bits_per_second"] == pytest.approx(2e9)
    assert found["cores_per_node"] == 2.0
    found = limits(seconds=0.5, cpu=1.0, thread=0.3, sent=0.0, busy=0.5)
    assert (found["engine_bound"], found["cpu_bound"]) == (False, False)
    assert found["engine_limit_bits_per_second"] is None
    assert set(limits(None, None, None, 0.0, None).values()) == {None}


@pytest.mark.parametrize(("emulated", "remedy"), [(EMULATED, "raise cluster.time_dilation"), ([], "take fewer nodes")])
def test_a_machine_that_was_the_limit_is_told_with_what_to_do(emulated: list[str], remedy: str) -> None:
    begun = summaries.begin(compose("train", [*emulated, "cluster=emulated"]), [])
    summary = begun | {"images_per_second": None, "eval_accuracy": 0.5, "cpu_bound": True}
    assert describe(summary)[-1].endswith(f"(cpu_bound): {remedy}")
    assert "cpu_bound" not in describe(summary | {"cpu_bound": False})[-1]
