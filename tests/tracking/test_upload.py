"""Run folders in MLflow: everything that belongs there, and the same however often it is done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from poseidon.errors import UserError
from poseidon.tracking.late import log_folders
from poseidon.tracking.upload import Upload, read_summary

from .conftest import METRICS, make_run, runs


def upload(store, folder, **options):
    return Upload(store, store.experiment("mlp-digits"), folder, **options)


def histories(store, run):
    names = ("train/loss", "eval/accuracy", "train/wall_s", "throughput/images_per_second_median")
    return {n: [(m.step, m.value, m.timestamp) for m in store.client.get_metric_history(run, n)] for n in names}


def test_a_folder_becomes_a_run(store, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_RUN_ID", "f" * 32)  # the fluent interface would take it
    folder = make_run(tmp_path / "run")
    (folder / "figures").mkdir()
    (folder / "figures" / "training.png").write_bytes(b"png")
    upload(store, folder).all()
    (run,) = runs(store, "mlp-digits")
    assert (run.info.run_name, run.info.status) == ("hybrid 2 nodes", "FINISHED")
    assert run.info.end_time - run.info.start_time == 9000
    assert run.data.params == {"comm.name": "hybrid", "seed": "1", "nodes": "2"}
    tags = run.data.tags
    assert tags["mlflow.source.git.commit"] == "abc"
    assert (tags["poseidon.status"], tags["poseidon.degree"], tags["poseidon.oversubscribed"]) == (
        "completed",
        "real",
        "true",
    )
    start = run.info.start_time
    assert histories(store, run.info.run_id) == {
        "train/loss": [(10, 2.0, start + 250), (20, 1.0, start + 500)],
        "eval/accuracy": [(20, 0.9, start + 600)],
        "train/wall_s": [(10, 0.25, start + 250), (20, 0.5, start + 500)],
        "throughput/images_per_second_median": [(20, 1000.0, start + 9000)],
    }
    assert run.data.metrics["comm/bytes_dense_sfb"] == 60.0
    assert run.data.metrics["comm/bytes_sent_per_iteration"] == 120.0
    assert "throughput/stall_seconds" not in run.data.metrics
    files = store.client.list_artifacts(run.info.run_id)
    assert [f.path for f in files] == [
        "config.yaml",
        "figures",
        "metrics.jsonl",
        "overrides.yaml",
        "plan.json",
        "summary.json",
    ]
    path = store.client.download_artifacts(run.info.run_id, "summary.json", str(tmp_path))
    assert json.loads(Path(path).read_text())["comm"] == "hybrid"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("status", "expected"), [("failed", "FAILED"), ("interrupted", "KILLED"), ("odd", "FAILED")])
def test_how_a_run_ended(store, tmp_path, status, expected):
    folder = make_run(tmp_path / "run", [], status=status, error="rank 1 failed", images_per_second=None)
    (folder / "plan.json").write_text("[]")
    (folder / "metrics.jsonl").unlink()
    upload(store, folder).all()
    (run,) = runs(store, "mlp-digits")
    assert run.info.status == expected
    assert run.data.tags["poseidon.error"] == "rank 1 failed"
    assert "plan.json" not in [f.path for f in store.client.list_artifacts(run.info.run_id)]


def test_metrics_come_as_they_are_written(store, tmp_path):
    folder = make_run(tmp_path / "run", [], status="running")
    running = upload(store, folder)
    running.begin()
    running.advance()
    lines = [json.dumps(line) + "\n" for line in METRICS]
    with (folder / "metrics.jsonl").open("a") as file:
        for written in (lines[0] + lines[1][:20], lines[1][20:], "not json\n" + lines[2]):
            file.write(written)
            file.flush()
            running.advance()
            running.advance()
    found = histories(store, running.run_id)
    assert [step for step, _, _ in found["train/loss"]] == [10, 20]
    assert [step for step, _, _ in found["eval/accuracy"]] == [20]
    assert store.client.get_run(running.run_id).info.status == "RUNNING"


def test_what_failed_is_logged_again_and_nothing_is_doubled(store, tmp_path, monkeypatch):
    many = [{"iteration": i, "wall_s": i / 10, "epoch": i / 100, "train_loss": 1 / i, "lr": 0.1} for i in range(1, 600)]
    folder = make_run(tmp_path / "run", many)
    running = upload(store, folder)
    log_batch, calls = store.client.log_batch, []

    def sometimes(run_id, metrics=(), **others):
        calls.append(len(metrics))
        if metrics and len(calls) in (5, 8):
            log_batch(run_id, metrics=metrics[:10])
            raise OSError("gone")
        return log_batch(run_id, metrics=metrics, **others)

    monkeypatch.setattr(store.client, "log_batch", sometimes)
    for _ in range(3):
        try:
            running.all()
            break
        except OSError:
            pass
    assert max(calls) <= 1000
    assert [step for step, _, _ in histories(store, running.run_id)["train/loss"]] == list(range(1, 600))
    assert len(runs(store, "mlp-digits")) == 1


def test_many_params(store, tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text("".join(f"key{i}: {'v' * 7000}\n" for i in range(205)))
    upload(store, folder).all()
    (run,) = runs(store, "mlp-digits")
    given = [value for key, value in run.data.params.items() if key.startswith("key")]
    assert len(given) == 205
    assert {len(value) for value in given} == {6000}


def test_logging_later_is_idempotent_also_for_a_copy(store, tmp_path, capsys):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")  # started in the same second
    log_folders([first, second], None, None)
    shutil.copytree(first, tmp_path / "copy of a")
    log_folders([tmp_path / "copy of a", first], store.uri, None)
    found = runs(store, "mlp-digits")
    assert {run.data.tags["poseidon.run_dir"] for run in found} == {str(first), str(second)}
    assert len(found) == 2
    for run in found:
        assert len(store.client.get_metric_history(run.info.run_id, "train/loss")) == 2
    said = capsys.readouterr().out.splitlines()
    assert ["brought up to date" in line for line in said] == [False, False, True, True]
    store.client.delete_run(found[0].info.run_id)
    log_folders([first, second], None, None)
    assert len(runs(store, "mlp-digits")) == 2


def test_a_run_of_another_host_is_another_run(store, tmp_path):
    mine = make_run(tmp_path / "a")
    log_folders([mine], None, "e")
    theirs = make_run(tmp_path / "a", host={"name": "there"})  # same path, same second
    log_folders([theirs], None, "e")
    assert len(runs(store, "e")) == 2


def test_a_run_that_was_running_when_its_machine_went_down_can_be_ended_later(store, tmp_path, capsys):
    folder = make_run(tmp_path / "a", status="running", ended=None)
    log_folders([folder], None, None)
    assert "still running" in capsys.readouterr().out
    assert runs(store, "mlp-digits")[0].info.status == "RUNNING"
    make_run(folder)
    log_folders([folder], None, None)
    assert [run.info.status for run in runs(store, "mlp-digits")] == ["FINISHED"]


def test_a_sweep_s_job_finds_its_parent_again(store, tmp_path):
    experiment = store.experiment("mlp-digits")
    parent = store.client.create_run(experiment).info.run_id
    lost = make_run(tmp_path / "a", mlflow={"parent_id": parent})
    strange = make_run(tmp_path / "b", mlflow={"parent_id": "0" * 32})
    log_folders([lost, strange], None, None)
    parents = {
        r.data.tags["poseidon.run_dir"]: r.data.tags.get("mlflow.parentRunId") for r in runs(store, "mlp-digits")
    }
    assert parents == {str(lost): parent, str(strange): None}


def test_a_folder_that_is_no_run_s_is_one_line_and_nothing_is_logged(store, tmp_path):
    good = make_run(tmp_path / "good")
    for content, words in ((None, "no run's folder"), ("{", "cannot be read"), ("[]", "no run's"), ("{}", "no run's")):
        bad = tmp_path / "bad"
        bad.mkdir(exist_ok=True)
        if content is not None:
            (bad / "summary.json").write_text(content)
        with pytest.raises(UserError, match=words):
            log_folders([good, bad], None, None)
    assert runs(store, "mlp-digits") == []
    assert read_summary(good)["comm"] == "hybrid"
