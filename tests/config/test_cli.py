"""The command line, with training replaced by taking notes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon import cli
from poseidon.config.schema import Comm
from poseidon.errors import UserError
from poseidon.training import job
from tests.config.conftest import CUSTOM, note

ROOT = Path(cli.__file__).resolve().parents[1]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_workflow_all_are_listed(arguments, capsys):
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^  train +Train ", printed, re.MULTILINE)
    assert re.search(r"^  demo +\w+", printed, re.MULTILINE)


def test_an_unknown_workflow_is_one_line_with_the_known_ones(capsys):
    assert cli.main(["trian"]) == 2
    message = capsys.readouterr().err
    known = ", ".join(cli.workflows())
    assert "demo, " in known
    assert message == f"poseidon: unknown workflow 'trian': did you mean train? known are {known}\n"


def test_help_shows_groups_keys_and_what_is_often_changed(capsys, asked):
    assert cli.main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for text in ("cluster.nodes=4", "ddp, downpour, fsdp, hybrid, p", "batch_size: 32", "--config-dir"):
        assert text in printed
    assert asked == []


def test_a_run_gets_typed_config_overrides_and_a_folder(asked, capfd):
    assert cli.main(["train", "comm=ps", "cluster.nodes=3", "hydra.run.dir=here"]) == 0
    (call,) = asked
    assert (call.config.comm.name, call.config.cluster.nodes) == (Comm.ps, 3)
    assert call.overrides == ["comm=ps", "cluster.nodes=3"]
    assert call.folder == Path.cwd() / "here"
    # Hydra writes nothing of its own: two runs may be given the same folder, and one of them moves aside.
    assert list(call.folder.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_the_default_folder_tells_the_time(asked):
    assert cli.main(["train"]) == 0
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", str(asked[0].folder.relative_to(Path.cwd())))


def test_the_exit_code_is_the_job_s(monkeypatch):
    note(monkeypatch, lambda config: 3)
    assert cli.main(["train"]) == 3


def test_a_mistake_found_by_the_job_is_one_line(monkeypatch, capfd):
    def run_job(*_):
        raise UserError("cluster.nodes: no such\nhost")

    monkeypatch.setattr(job, "run_job", run_job)
    assert cli.main(["train"]) == 2
    assert capfd.readouterr().err == "poseidon train: cluster.nodes: no such host\n"


def test_a_sweep_runs_every_job_in_a_folder_of_its_own(asked):
    assert cli.main(["train", "-m", "comm=ps,hybrid", "cluster.nodes=1,2", "hydra.sweep.dir=sweep"]) == 0
    assert [(c.config.comm.name.value, c.config.cluster.nodes) for c in asked] == [
        ("ps", 1),
        ("ps", 2),
        ("hybrid", 1),
        ("hybrid", 2),
    ]
    assert [c.folder for c in asked] == [Path.cwd() / "sweep" / str(number) for number in range(4)]


def test_sweeps_started_in_the_same_second_do_not_share_a_folder(asked, monkeypatch):
    from poseidon.config import store

    for unique in ("aaaaaa", "bbbbbb"):
        monkeypatch.setattr(store, "UNIQUE", unique)
        assert cli.main(["train", "-m", "seed=0,1"]) == 0
    parents = [call.folder.parent for call in asked]
    assert parents[0] == parents[1] != parents[2] == parents[3]
    assert [str(parent)[-7:] for parent in parents[::2]] == ["-aaaaaa", "-bbbbbb"]


def test_a_failed_job_fails_the_sweep_but_not_the_jobs_after_it(monkeypatch, capfd):
    calls = note(monkeypatch, lambda config: 1 if config.seed == 0 else 0)
    assert cli.main(["train", "-m", "seed=0,1,2", "hydra.sweep.dir=sweep"]) == 1
    assert [call.config.seed for call in calls] == [0, 1, 2]
    assert "seed=0" in capfd.readouterr().err


def test_an_interrupted_job_ends_the_sweep(monkeypatch):
    calls = note(monkeypatch, lambda config: 130)
    assert cli.main(["train", "-m", "seed=0,1,2", "hydra.sweep.dir=sweep"]) == 130
    assert len(calls) == 1


def test_showing_the_config_starts_nothing(capsys, asked):
    assert cli.main(["train", "--cfg", "job", "comm=ps"]) == 0
    assert "name: ps" in capsys.readouterr().out
    assert asked == []
    assert list(Path.cwd().iterdir()) == []


def test_one_s_own_parts_by_config_dir(asked, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.chdir(CUSTOM)
    parts = ["model=mine", "dataset=mine", "loss=mine", "metric=mine"]
    assert cli.main(["train", "--config-dir", "conf", *parts, f"hydra.run.dir={folder}"]) == 0
    assert asked[0].config.dataset["_target_"] == "spirals.data.spirals"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("poseidon tr", "train"),
        ("poseidon train model=le", "model=lenet"),
        ("poseidon train comm.overlap=", "comm.overlap=full"),
        ("poseidon train trainer.eval_b", "trainer.eval_batch_size="),
    ],
)
def test_tab_completes(line, expected, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    assert expected in capsys.readouterr().out.split()


def test_tab_in_a_workflow_without_completion_prints_nothing(capfd, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "poseidon demo x")
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capfd.readouterr() == ("", "")


def test_the_completion_to_install_is_for_the_program(capsys):
    assert cli.main(["train", "-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion poseidon")


def test_neither_help_nor_a_mistake_imports_what_takes_seconds(tmp_path):
    code = (
        "import sys; from poseidon import cli; from poseidon.training import job\n"
        "for args in ([], ['train', '--help'], ['train', 'model=x'], ['train', 'tracking.mlflow=false']):\n"
        "    job.run_job = lambda *a: job.JobOutcome(0, None, None); cli.main(args)\n"
        "print('HEAVY', sorted({'torch', 'mlflow', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cluster=local"], "cluster=local: poseidon validate measures emulated networks"),
        (["cluster.nodes=1"], "cluster.nodes=1: must be at least 2"),
        (["validate.seconds=0"], "validate.seconds=0.0: must be greater than 0"),
        (["cluster.bandwidth=fast"], "cluster.bandwidth=fast: must be a rate"),
    ],
)
def test_validate_says_in_one_line_what_cannot_be_measured(arguments, words, capfd):
    assert cli.main(["validate", *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"poseidon validate: {words}")
    assert printed.err.count("\n") == 1
