"""A whole run with real processes: records, failures, and the same code for one rank and two."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from poseidon.config.schema import ClusterConfig, Comm, Overlap, Part, TrainConfig
from poseidon.errors import UserError
from poseidon.tracking.folder import read_json
from poseidon.tracking.where import store_uri
from poseidon.training import progress
from poseidon.training.job import run_job

PARTS = '''
import os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[:993], y[:993]), TensorDataset(x[1000:1301], y[1000:1301])

class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

class Broken(MLP):
    def forward(self, x):
        if self.training:
            raise ZeroDivisionError("mine")
        return super().forward(x)

class Forked(MLP):
    """Its last weight differs on rank 1 once training is over."""
    def forward(self, x):
        if not self.training and os.environ["RANK"] == "1":
            with torch.no_grad():
                self[2].bias[0] += 1
        return super().forward(x)

class Refusing(MLP):
    def __init__(self):
        raise ValueError("no such thing")
'''


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The spec of a small run, of parts in a module of the user's own beside the current folder."""
    (tmp_path / "job_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    config = TrainConfig(
        model={"_target_": "job_parts.MLP", "name": "small"},
        dataset={"_target_": "job_parts.data", "name": "digits"},
        loss={"_target_": "torch.nn.CrossEntropyLoss"},
        metric={"_target_": "poseidon.training.metrics.accuracy", "_partial_": True},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
        schedule={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "interval": "epoch"},
        cluster=ClusterConfig(nodes=2),
        seed=1,
    )
    config.trainer.epochs = 2
    config.trainer.batch_size = 16
    return config


def store() -> Any:
    """A client of the store in which these runs are tracked."""
    from mlflow import MlflowClient

    return MlflowClient(store_uri())


def test_two_nodes_leave_all_records(config, tmp_path, capfd):
    config.trainer.checkpoint_every = 20
    outcome = run_job(config, ["seed=1"], tmp_path / "run")
    shown = capfd.readouterr().out
    assert outcome.exit_code == 0, shown
    run = tmp_path / "run"
    assert outcome.run_dir == run
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "figures",
        "logs",
        "metrics.jsonl",
        "overrides.yaml",
        "plan.json",
        "result.json",
        "spec.json",
        "summary.json",
    ]
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank0.log", "rank1.log"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "iteration-20.pt",
        "iteration-40.pt",
        "iteration-60.pt",
        "last.pt",
    ]
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == ["seed=1"]
    assert yaml.safe_load((run / "config.yaml").read_text())["comm"]["name"] == "hybrid"
    summary = read_json(run / "summary.json")
    assert summary == outcome.summary
    assert {key: summary[key] for key in ("status", "error", "degree", "comm", "overlap", "model", "dataset")} == {
        "status": "completed",
        "error": None,
        "degree": "real",
        "comm": "hybrid",
        "overlap": "full",
        "model": "small",
        "dataset": "digits",
    }
    assert (summary["nodes"], summary["devices_per_node"], summary["batch_size"]) == (2, 1, 16)
    assert (summary["iterations"], summary["epochs"]) == (2 * 32, 2)
    assert set(summary["iteration_seconds"]) == {"mean", "median", "p10", "p90", "max"}
    assert summary["images_per_second"] == pytest.approx(32 / summary["iteration_seconds"]["median"])
    for key in ("bytes_sent_per_iteration", "bytes_dense_per_iteration", "bytes_planned_per_iteration"):
        assert len(summary[key]) == 2
        assert min(summary[key]) > 0
    assert summary["cpu_seconds_per_iteration"] > 0
    assert summary["stall_seconds"] > 0
    assert set(summary["schemes"]) == {"0", "2"}
    assert len(summary["replica_digests"]) == 2
    assert len(set(summary["replica_digests"])) == 1
    assert summary["eval_accuracy"] == outcome.value > 0.8
    assert summary["train_loss"] < 1
    assert summary["versions"]["torch"]
    assert summary["host"]["cores"] >= 1
    assert isinstance(summary["oversubscribed"], bool)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["iteration"] for m in metrics if "train_loss" in m] == [10, 20, 30, 32, 40, 50, 60, 64]
    assert [m["epoch"] for m in metrics if "eval_accuracy" in m] == [1, 2]
    assert {row["layer"] for row in read_json(run / "plan.json")} == {"0", "2"}
    assert f"records: {run}" in shown
    assert "@poseidon" not in shown
    assert set(summary["bytes_by_scheme"]) == {"ps", *summary["schemes"].values()}
    assert sum(summary["bytes_by_scheme"].values()) == pytest.approx(
        max(summary["bytes_dense_per_iteration"]), rel=0.05
    )
    tracked = store().get_run(summary["mlflow"]["run_id"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["trainer.batch_size"] == "16"
    for metric, value in (
        ("throughput/images_per_second_median", summary["images_per_second"]),
        ("eval/accuracy", summary["eval_accuracy"]),
        ("train/wall_s", metrics[-2]["wall_s"]),
    ):
        assert tracked.data.metrics[metric] == pytest.approx(value)


@pytest.mark.slow
def test_downpour_learns_and_goes_on_from_its_checkpoint(config, tmp_path, capfd):
    """Without waiting, three workers; what is evaluated, saved and compared is alike on all of them."""
    config.comm.name, config.comm.overlap, config.cluster.nodes = Comm.downpour, Overlap.backward, 3
    config.optimizer |= {"lr": 0.1, "momentum": 0.5}
    config.trainer.epochs, config.trainer.check_every, config.trainer.clip_norm = 10, 50, 1.0
    config.schedule["step_size"] = 8
    found = run_job(config, [], tmp_path / "downpour").summary
    shown = capfd.readouterr().out
    assert found["status"] == "completed", shown
    assert found["eval_accuracy"] > 0.85
    assert len(set(found["replica_digests"])) == 1
    assert found["bytes_dense_per_iteration"] == pytest.approx(found["bytes_planned_per_iteration"], rel=0.02)
    assert set(found["schemes"].values()) == {"ps"}
    assert "replicas differed while training, by nature, and were made alike at its end" in shown
    saved = torch.load(tmp_path / "downpour" / "checkpoints" / "last.pt")
    assert all("momentum_buffer" in state for state in saved["optimizer"]["state"].values())
    config.trainer.resume = str(tmp_path / "downpour" / "checkpoints" / "last.pt")
    config.trainer.epochs = 11
    more = run_job(config, [], tmp_path / "more").summary
    assert more["epochs"] == 11
    assert more["eval_accuracy"] > 0.85
    assert more["train_loss"] < 1.0


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two_under_pytorchs_own_to_the_same_result(config, tmp_path):
    single = replace(
        config,
        comm=replace(config.comm, name=Comm.single),
        trainer=replace(config.trainer, global_batch=32, checkpoint_every=32),
    )
    whole = run_job(single, [], tmp_path / "single").summary
    assert (whole["nodes"], whole["batch_size"], whole["bytes_sent_per_iteration"]) == (1, 32, [0.0])
    assert whole["bytes_by_scheme"] == {}
    assert_goes_on(config, Comm.ddp, tmp_path, whole)
    assert_goes_on(config, Comm.fsdp, tmp_path, whole)
    # What the sharded run has saved is whole, and what one process would have.
    saved = [torch.load(tmp_path / run / "checkpoints" / "last.pt") for run in ("single", "fsdp")]
    for part in ("model", "optimizer"):
        torch.testing.assert_close(saved[1][part], saved[0][part], rtol=1e-3, atol=1e-4)


def assert_goes_on(config, comm, tmp_path, whole):
    """From the half of the single run to its end."""
    comms = replace(config.comm, name=comm, overlap=Overlap.backward)
    run = replace(config, comm=comms, trainer=replace(config.trainer))
    run.trainer.resume = str(tmp_path / "single" / "checkpoints" / "iteration-32.pt")
    run.trainer.clip_norm = 1e9
    run.trainer.check_every = 20
    found = run_job(run, [], tmp_path / comm.value).summary
    assert (found["status"], found["iterations"]) == ("completed", 64)
    assert found["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)
    assert found["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-3)
    assert found["stall_seconds"] is None  # nobody can see it
    assert found["bytes_source"] == "computed"
    assert found["bytes_dense_per_iteration"] == [4 * (64 * 64 + 64 + 64 * 10 + 10)] * 2
    assert found["bytes_by_scheme"] == {comm.value: max(found["bytes_dense_per_iteration"])}
    # The steps of the resumed run go on where the checkpoint was.
    steps = [point.step for point in store().get_metric_history(found["mlflow"]["run_id"], "train/loss")]
    assert min(steps) > 32
    assert max(steps) == 64


def test_interrupted_after_a_while_says_how_far_it_was(config, tmp_path, monkeypatch):
    def on_line(self, rank, stream, text):
        record = progress.parse(text)
        if record is not None:
            self.last.update(record)
            if "eval_accuracy" in record:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(progress.Display, "on_line", on_line)
    config.trainer.epochs = 10_000
    outcome = run_job(config, [], tmp_path / "run")
    assert outcome.exit_code == 130
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["status"] == "interrupted"
    assert summary["iterations"] >= 32
    assert summary["eval_accuracy"] > 0.3
    assert summary["replica_digests"] is None
    assert set(summary["schemes"]) == {"0", "2"}


def test_users_code_that_fails_leaves_a_summary(config, tmp_path, capfd):
    config.model = Part.of("model", {"_target_": "job_parts.Broken"})
    outcome = run_job(config, [], tmp_path / "run")
    assert outcome.exit_code == 1
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["status"] == "failed"
    assert "ZeroDivisionError: mine" in summary["error"]
    assert summary["comm"] == "hybrid"
    assert summary["images_per_second"] is None
    output = capfd.readouterr()
    assert (output.out + output.err).count("Traceback") == 1
    assert f"records: {tmp_path / 'run'}" in output.out


def test_a_part_that_cannot_be_built_is_one_line(config, tmp_path, capfd):
    config.model = Part.of("model", {"_target_": "job_parts.Refusing"})
    outcome = run_job(config, [], tmp_path / "run")
    assert outcome.exit_code == 2
    output = capfd.readouterr()
    assert "Traceback" not in output.out + output.err
    assert (output.out + output.err).count("no such thing") == 1
    assert "model" in outcome.summary["error"]


@pytest.mark.slow  # its logic is in test_loop.py
def test_replicas_that_differ_fail_the_run(config, tmp_path, capfd):
    config.model = Part.of("model", {"_target_": "job_parts.Forked"})
    outcome = run_job(config, [], tmp_path / "run")
    assert outcome.exit_code == 1
    assert outcome.summary["status"] == "failed"
    assert "2.bias of rank 1" in outcome.summary["error"]
    assert len(set(outcome.summary["replica_digests"])) == 2
    output = capfd.readouterr()
    assert "Traceback" not in output.out + output.err


def test_nothing_starts_when_the_checkpoint_is_missing(config, tmp_path):
    config.trainer.resume = "nowhere.pt"
    with pytest.raises(UserError, match=r"trainer\.resume: there is no file .*nowhere\.pt"):
        run_job(config, [], tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "last.pt").touch()
    config.trainer.resume = "old"
    with pytest.raises(UserError, match=r"is a folder; its newest checkpoint is .*last\.pt"):
        run_job(config, [], tmp_path / "run")


def test_the_launching_process_imports_nothing_heavy_before_it_must():
    import subprocess

    code = "import sys, poseidon.training.job; sys.exit(bool({'torch', 'mlflow', 'matplotlib'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
