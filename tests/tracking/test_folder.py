"""Run folders, metrics and facts."""

from __future__ import annotations

import json
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from poseidon.errors import UserError
from poseidon.tracking.facts import git_state, host_facts, versions
from poseidon.tracking.folder import create_run_dir, read_json, write_json
from poseidon.tracking.metrics import MetricsWriter


def test_runs_started_together_never_share_a_folder(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(create_run_dir, [tmp_path / "runs" / "now"] * 40))
    assert len(set(made)) == 40
    assert all((path / "logs").is_dir() for path in made)
    assert tmp_path / "runs" / "now" in made


def test_a_folder_that_exists_but_has_no_run_is_taken(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    assert create_run_dir(tmp_path / "mine") == tmp_path / "mine"
    assert create_run_dir(tmp_path / "mine") == tmp_path / "mine-1"


def test_a_file_in_the_way_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    for wanted in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"hydra\.run\.dir"):
            create_run_dir(wanted)


def test_json_is_strict_and_replaced_whole(tmp_path):
    path = tmp_path / "summary.json"
    assert read_json(path) is None
    write_json(path, {"loss": math.nan, "list": [math.inf, 1.0]})
    assert json.loads(path.read_text()) == {"loss": None, "list": [None, 1.0]}
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert read_json(path) == {"loss": None, "list": [None, 1.0]}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_metrics_are_buffered_and_written_as_the_run_goes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, interval=3600) as writer:
        writer.write({"iteration": 1, "train_loss": math.nan})
        assert path.read_text() == ""
        writer.flush()
        assert json.loads(path.read_text()) == {"iteration": 1, "train_loss": None}
        writer.write({"iteration": 2})
    assert len(path.read_text().splitlines()) == 2
    with MetricsWriter(path, interval=0) as writer:
        writer.write({"iteration": 3})
        assert len(path.read_text().splitlines()) == 3


def test_facts():
    assert {"python", "torch", "torchvision", "poseidon", "pyzmq", "hydra"} <= set(versions())
    host = host_facts()
    assert host["cores"] >= 1
    assert host["memory"] > 1e8
    assert host["cpu"]
    assert host["os"]


def test_git_commit_of_the_current_folder(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    monkeypatch.chdir(tmp_path)
    assert git_state() == {"git_commit": git("rev-parse", "HEAD"), "git_dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state()["git_dirty"] is True
