"""cluster.time_dilation=auto: what an iteration asks of this machine, and the factor that follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poseidon import cli
from poseidon.config.check import check_train
from poseidon.config.compose import compose
from poseidon.config.schema import TrainConfig
from poseidon.errors import PoseidonError
from poseidon.training import dilation, job
from poseidon.training.dilation import PER_BYTE, PER_LAYER, SHARE, Demand, demand, pick, with_factor


def config(*overrides: str) -> TrainConfig:
    """One of the small experiments."""
    return compose("train", ["experiment=p15_alexnet", *overrides])


@pytest.mark.parametrize(
    ("cpu", "thread", "cores", "factor"),
    [
        (0.0, 0.0, 2, 1.0),
        (0.1, 0.1, 2, 1.0),  # time enough
        (1.2, 0.6, 2, 1.0),  # just
        (1.21, 0.1, 2, 2.0),  # the cores are short
        (1.0, 0.7, 64, 2.0),  # the thread is, however many cores there are
        (4.7, 1.0, 2, 4.0),
        (33.0, 2.0, 2, 32.0),
    ],
)
def test_the_least_power_of_two_that_leaves_cores_and_thread_some_rest(cpu, thread, cores, factor):
    needs = Demand("x", cpu=cpu, thread=thread, seconds=1.0)
    found = needs.factor(cores)
    assert found == factor
    assert cpu / cores <= SHARE * found
    assert thread <= SHARE * found


def test_bytes_and_layers_of_all_nodes_count():
    found = demand(config("comm=ps", "cluster.nodes=8"))
    sent = 427038504  # P15's arithmetic: 2 x 7/8 x 4 bytes x 60,965,224 parameters
    assert found.cpu == pytest.approx(8 * (PER_BYTE * sent + 8 * PER_LAYER), rel=0.01)
    assert found.seconds == pytest.approx(1.44)
    single = demand(config("comm=single", "cluster.nodes=8"))
    assert single.cpu == pytest.approx(8 * PER_LAYER)
    assert single.thread == 0


def test_an_iteration_lasts_as_long_as_the_slowest_link_takes():
    fast, slow, one_slow = (
        demand(config("comm=ps", "cluster.nodes=2", *more)).seconds
        for more in (["cluster.bandwidth=null"], ["cluster.bandwidth=100mbit"], ["+cluster.node_bandwidth.1=100mbit"])
    )
    assert fast == pytest.approx(1.44)
    assert slow == one_slow == pytest.approx(8 * 60965224 * 4 / 100e6, rel=0.01)


@pytest.mark.parametrize("comm", ["single", "ps", "sfb", "hybrid", "caffe_ps", "ddp", "fsdp"])
def test_every_comm_has_a_demand(comm):
    assert demand(config(f"comm={comm}", "cluster.nodes=4")).cpu > 0


def test_the_most_demanding_run_decides_for_all(monkeypatch):
    monkeypatch.setattr(dilation, "cores", lambda: 2)
    runs = [config(f"comm={comm}", f"cluster.nodes={nodes}") for comm in ("hybrid", "ps") for nodes in (1, 2, 8)]
    alone = [pick([run]).factor for run in runs]
    assert len(set(alone)) > 1
    picked = pick(runs)
    assert picked.factor == max(alone)
    assert str(picked).startswith(f"cluster.time_dilation=auto: f = {max(alone):g} (alexnet, comm=ps, 8 nodes: ")


def test_runs_with_a_factor_of_their_own_have_no_say():
    own = config("comm=ps", "cluster.time_dilation=3")
    assert pick([own]) is None
    assert with_factor(own, 16.0) is own
    assert pick([own, config("comm=single")]).factor == 1


def test_what_is_computed_for_real_is_not_slowed_down():
    real = config("~hardware")
    check_train(real)
    assert pick([real]).factor == 1
    assert with_factor(real, 16.0).cluster.time_dilation == 1


def test_no_more_runs_are_looked_at_than_differ(monkeypatch):
    seen: list[Any] = []

    def noted(run: TrainConfig) -> Demand:
        seen.append((run.comm.name.value, run.cluster.nodes))
        return Demand("x", 1.0, 1.0, 1.0)

    monkeypatch.setattr(dilation, "demand", noted)
    pick(
        [
            config(f"seed={seed}", f"cluster.nodes={n}", f"comm={c}")
            for seed in (0, 1)
            for n in (1, 4)
            for c in ("ps", "ddp")
        ]
    )
    assert sorted(seen) == [("ddp", 4), ("ps", 4)]


def test_a_sweep_hands_one_factor_to_all_of_its_jobs(tmp_path, monkeypatch, capfd):
    """Each job's config and records have the number, and the model is looked at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dilation, "cores", lambda: 2)
    launched: list[float] = []

    def launch_job(argv: Any, cluster: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(cluster.time_dilation)
        raise PoseidonError("enough")

    monkeypatch.setattr(job, "launch_job", launch_job)
    monkeypatch.setattr(job, "find_host", lambda: None)
    arguments = ["experiment=p15_alexnet", "tracking.mlflow=false", "comm=single,hybrid", "cluster.nodes=2,8"]
    assert cli.main(["train", "-m", *arguments, "hydra.sweep.dir=sweep"]) != 0
    factor = pick([config("comm=hybrid", "cluster.nodes=8")]).factor
    assert factor > pick([config("comm=single")]).factor
    assert launched == [factor] * 4
    for folder in map(Path, ("sweep/0", "sweep/3")):
        assert json.loads((folder / "summary.json").read_text())["time_dilation"] == factor
        assert f"time_dilation: {factor}" in (folder / "config.yaml").read_text()
    assert capfd.readouterr().out.count(f"f = {factor:g} (alexnet, comm=hybrid, 8 nodes") == 1


def test_a_run_alone_picks_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "find_host", lambda: None)
    monkeypatch.setattr(dilation, "cores", lambda: 1)
    alone = config("comm=ps", "tracking.mlflow=false")

    class Ended(Exception):
        pass

    def launch_job(argv: Any, cluster: Any, *args: Any, **kwargs: Any) -> Any:
        raise Ended(cluster.time_dilation)

    monkeypatch.setattr(job, "launch_job", launch_job)
    with pytest.raises(Ended) as ended:
        job.run_job(alone, [], tmp_path / "run")
    assert ended.value.args == (pick([alone]).factor,)
    assert ended.value.args[0] > 8


def test_the_issue_s_p17_cells_of_two_nodes_leave_two_cores_some_rest(monkeypatch):
    monkeypatch.setattr(dilation, "cores", lambda: 2)
    for comm in ("ps", "hybrid", "ddp"):
        run = compose("train", ["experiment=p17_vgg19_22k_10gbe", "cluster.nodes=2", f"comm={comm}"])
        needs, factor = demand(run), pick([run]).factor
        assert needs.cpu <= SHARE * 2 * needs.seconds * factor
        assert factor == 1 or needs.cpu > SHARE * 2 * needs.seconds * factor / 2  # and no slower than it must be
