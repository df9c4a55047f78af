"""The demo's verdict; the runs themselves are `make demo`."""

from __future__ import annotations

import pytest

from poseidon import reporting
from poseidon.cli import load, workflows
from poseidon.training import job


@pytest.fixture
def demo():
    return load(workflows()["demo"])


def fake_runs(monkeypatch, accuracies, exit_code=0):
    """Runs that end at once; what they were asked for."""
    asked = []

    def run_job(config, overrides, run_dir):
        asked.append((config, run_dir))
        comm = config.comm.name.value
        several = comm != "single"
        summary = {
            "model": "lenet",
            "dataset": "mnist5k",
            "comm": comm,
            "nodes": config.cluster.nodes if several else 1,
            "global_batch": 64 if several or config.trainer.global_batch else 32,
            "eval_accuracy": accuracies[comm],
            "train_loss": 0.01,
            "images_per_second": 1000.0,
            "bytes_sent_per_iteration": [1e6] * (2 if several else 1),
            "bytes_source": "computed" if comm == "ddp" else "counted",
            "replica_digests": ["abcdef0123"] * (2 if several else 1),
            "oversubscribed": False,
        }
        return job.JobOutcome(exit_code, 0.9, run_dir, summary)

    monkeypatch.setattr(job, "run_job", run_job)
    return asked


def test_compares_four_runs_over_the_same_rows_with_the_speed_of_one_node(demo, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    asked = fake_runs(monkeypatch, dict.fromkeys(demo.RUNS.values(), 0.97))
    assert demo.main(["trainer.batch_size=24", "cluster.nodes=3", "tracking.mlflow=false"]) == 0
    assert [config.comm.name.value for config, _ in asked] == ["single", "single", "ddp", "ps", "hybrid"]
    assert [config.trainer.global_batch for config, _ in asked] == [None, 72, None, None, None]
    assert len({run_dir.parent for _, run_dir in asked}) == 1
    shown = capsys.readouterr().out
    assert shown.count("97.00%") == 5
    assert shown.count("abcdef01 x2") == 3
    assert "1.000*" in shown
    assert str(asked[0][1].parent) in shown
    assert "report:" not in shown


def test_ends_with_the_report_of_its_runs(demo, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    fake_runs(monkeypatch, dict.fromkeys(demo.RUNS.values(), 0.97))
    wanted = []

    def make_report(config):
        wanted.append(config.report.experiment)
        return tmp_path / "reports" / "demo" / "index.html"

    monkeypatch.setattr(reporting, "make_report", make_report)
    assert demo.main([]) == 0
    assert wanted == ["demo"]
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'reports' / 'demo' / 'index.html'}"


def test_fails_if_accuracies_are_half_a_point_apart(demo, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    fake_runs(monkeypatch, {**dict.fromkeys(demo.RUNS.values(), 0.970), "ps": 0.964})
    assert demo.main(["tracking.mlflow=false"]) == 1
    assert "0.60 points apart" in capsys.readouterr().err


def test_a_failed_run_ends_it_with_that_runs_code(demo, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = fake_runs(monkeypatch, dict.fromkeys(demo.RUNS.values(), 0.97), exit_code=130)
    assert demo.main([]) == 130
    assert len(asked) == 1


@pytest.mark.parametrize("argument", ["comm=ps", "trainer.global_batch=3", "-m", "trainer.epoch=3"])
def test_bad_arguments_are_one_line_and_start_nothing(demo, monkeypatch, tmp_path, capsys, argument):
    monkeypatch.chdir(tmp_path)
    asked = fake_runs(monkeypatch, {})
    assert demo.main([argument]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_help_is_short(demo, capsys):
    assert demo.main(["--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 15
