"""Jobs and sweeps as the command line runs them, with ranks that only leave results."""

from __future__ import annotations

import json
import signal
from io import StringIO
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from rich.console import Console

from poseidon import cli
from poseidon.cluster.base import JobResult
from poseidon.tracking.folder import read_json, write_json
from poseidon.tracking.overview import table
from poseidon.tracking.sweep import Sweep, _axes_tag
from poseidon.training import job

from .conftest import METRICS, runs

SMALL = ["model=mlp", "dataset=digits"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "run_figures", lambda folder: [])
    yield
    GlobalHydra.instance().clear()


@pytest.fixture
def ranks(monkeypatch):
    """Ranks that succeed unless ``ranks.ends`` says otherwise for a seed; ``ranks.before`` is called first."""

    class Ranks:
        ends: dict[int, JobResult] = {}  # noqa: RUF012 - replaced, not changed

        @staticmethod
        def before(config):
            pass

    def launch_job(argv, cluster, world_size, log_dir, env, on_line):
        folder = log_dir.parent
        config = read_json(folder / "spec.json")["config"]
        Ranks.before(config)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
        result = Ranks.ends.get(config["seed"], JobResult(True, 0, None, "", False, (0,)))
        if result.ok:
            measured = {
                "eval_accuracy": 0.9,
                "train_loss": 0.1,
                "iterations": 20,
                "images_per_second": 100.0,
                "iteration_seconds": {"mean": 0.1, "median": 0.1, "p10": 0.1, "p90": 0.1},
                "stall_seconds": 0.01,
                "bytes_sent_per_iteration": [5e5] * world_size,
            }
            write_json(folder / "result.json", measured)
        return result

    monkeypatch.setattr(job, "launch_job", launch_job)
    return Ranks


FAILED = JobResult(False, 1, 0, "rank 0 failed", False, (1,))
INTERRUPTED = JobResult(False, 130, None, "interrupted by Ctrl-C", True, (130,))


def test_one_run_and_its_reference(store, ranks, capsys):
    assert cli.main(["train", *SMALL, "hydra.run.dir=run", "tracking.run_name=mine"]) == 0
    (run,) = runs(store, "mlp-digits")
    summary = read_json(Path("run/summary.json"))
    assert summary["experiment"] == "mlp-digits"
    assert summary["mlflow"] == {
        "uri": store.uri,
        "experiment_id": run.info.experiment_id,
        "run_id": run.info.run_id,
        "parent_id": None,
    }
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.tags["poseidon.run_dir"] == str(Path("run").absolute())
    assert run.data.params["trainer.batch_size"] == "32"
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == [
        f"records: {Path('run').absolute()}",
        "mlflow: experiment mlp-digits, run mine; to see it: poseidon ui",
    ]


def test_without_mlflow_the_store_is_left_alone(store, ranks, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert cli.main(["train", *SMALL, "hydra.run.dir=run", "tracking.mlflow=false"]) == 0
    assert "mlflow:" not in capsys.readouterr().out
    summary = read_json(Path("run/summary.json"))
    assert (summary["mlflow"], summary["experiment"]) == (None, "mlp-digits")


def test_names_of_experiments(store, ranks, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    assert cli.main(["train", *SMALL]) == 0
    assert cli.main(["train", *SMALL, "tracking.experiment='my own'"]) == 0
    assert len(runs(store, "of the environment")) == len(runs(store, "my own")) == 1


@pytest.mark.parametrize("sweep", [[], ["-m", "seed=1,2"]])
def test_a_server_that_is_down_is_one_line_and_nothing_starts(store, ranks, sweep, capfd, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # one that urllib3 would tell of
    ranks.before = lambda config: pytest.fail("started")
    assert cli.main(["train", *sweep, *SMALL]) == 2
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    for words in ("http://127.0.0.1:9", "connection refused", "MLFLOW_TRACKING_URI", "tracking.mlflow=false"):
        assert words in message
    assert [path.name for path in Path.cwd().iterdir() if path.name != "store"] == []


def test_a_deleted_experiment_is_one_line_and_no_folder(store, ranks, capfd):
    store.client.delete_experiment(store.experiment("mlp-digits"))
    assert cli.main(["train", *SMALL]) == 2
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    assert "mlp-digits: an experiment of that name was deleted" in message
    assert not Path("outputs").exists()


def test_a_failed_run(store, ranks):
    ranks.ends = {0: FAILED}
    assert cli.main(["train", *SMALL]) == 1
    (run,) = runs(store, "mlp-digits")
    assert run.info.status == "FAILED"
    assert run.data.tags["poseidon.error"] == "rank 0 failed"


def test_an_exception_while_starting_ends_the_run(store, ranks):
    def interrupt(config):
        raise KeyboardInterrupt

    ranks.before = interrupt
    assert cli.main(["train", *SMALL]) == 130
    (run,) = runs(store, "mlp-digits")
    assert (run.info.status, run.data.tags["poseidon.status"]) == ("KILLED", "interrupted")


def test_a_sweep_has_a_parent_with_its_axes(store, ranks, capsys):
    assert cli.main(["train", "-m", *SMALL, "comm=ddp,ps", "cluster.nodes=2", "seed=range(2)"]) == 0
    (parent,) = runs(store, "mlp-digits", "sweep")
    assert parent.info.run_name == "sweep comm=ddp,ps seed=0,1"
    assert parent.info.status == "FINISHED"
    assert json.loads(parent.data.tags["poseidon.axes"]) == {"comm": ["ddp", "ps"], "seed": ["0", "1"]}
    jobs = runs(store, "mlp-digits")
    assert {run.data.tags["mlflow.parentRunId"] for run in jobs} == {parent.info.run_id}
    assert sorted(run.info.run_name for run in jobs) == [
        "ddp 2 nodes seed=0",
        "ddp 2 nodes seed=1",
        "ps 2 nodes seed=0",
        "ps 2 nodes seed=1",
    ]
    shown = capsys.readouterr().out
    table = shown[shown.index("┏") :]
    assert [line.count("│") for line in table.splitlines() if "completed" in line] == [8] * 4
    assert table.count("90.00%") == 4
    assert "0.500" in table
    assert table.splitlines()[-2:] == [
        "to compare them: poseidon report report.experiment=mlp-digits",
        "to compare them: poseidon ui",
    ]
    assert Sweep.current() == Sweep()


def test_jobs_of_different_models_share_an_experiment(store, ranks):
    assert cli.main(["train", "-m", "model=mlp,cifar10_quick", "dataset=synthetic"]) == 0
    assert len(runs(store, "models-synthetic")) == 2
    assert read_json(next(Path().glob("multirun/*/*/0/summary.json")))["experiment"] == "models-synthetic"


def test_the_table_tells_nodes_where_the_axes_do_not():
    single = {"overrides": ["cluster.nodes=2", "+model.x=[1,2]"], "nodes": 1, "status": "completed"}
    several = {"overrides": ["cluster.nodes=4", "+model.x=[3]"], "nodes": 4, "throughput_only": True}
    several["eval_accuracy"] = 0.5
    headings = [column.header for column in table([single, several], ["cluster.nodes", "+model.x"]).columns]
    assert headings == ["cluster.nodes", "model.x", "nodes", "accuracy", "images/s", "MB sent", "status"]
    shown = table([several], ["cluster.nodes", "+model.x"])
    assert "nodes" not in [column.header for column in shown.columns]
    console = Console(width=100, record=True, file=StringIO())
    console.print(shown)
    text = console.export_text()
    assert "[3]" in text
    assert "50.00% (meaningless)" in text


def test_explicit_experiments_have_a_parent_each(store, ranks):
    assert cli.main(["train", "-m", *SMALL, "tracking.experiment=a,b"]) == 0
    for name in ("a", "b"):
        (parent,) = runs(store, name, "sweep")
        (run,) = runs(store, name)
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id


@pytest.mark.parametrize(
    ("end", "code", "expected"),
    [(FAILED, 1, {"1": "FAILED", "2": "FINISHED"}), (INTERRUPTED, 130, {"1": "KILLED"})],
)
def test_a_sweep_that_does_not_go_well(store, ranks, end, code, expected, capsys):
    ranks.ends = {1: end}
    assert cli.main(["train", "-m", *SMALL, "seed=1,2"]) == code
    (parent,) = runs(store, "mlp-digits", "sweep")
    assert parent.info.status == expected["1"]
    assert {run.data.params["seed"]: run.info.status for run in runs(store, "mlp-digits")} == expected
    assert capsys.readouterr().out.count("completed") == len(expected) - 1


def test_ctrl_c_and_sigterm_between_jobs(store, ranks, monkeypatch):
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        monkeypatch.setattr(ranks, "before", lambda config, n=number: signal.raise_signal(n))
        assert cli.main(["train", "-m", *SMALL, "seed=1,2", f"tracking.experiment=e{code}"]) == code
        (parent,) = runs(store, f"e{code}", "sweep")
        assert parent.info.status == "KILLED"
        assert len(runs(store, f"e{code}")) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_store_that_goes_down_does_not_stop_the_sweep(store, ranks, capfd, monkeypatch):
    file = Path(store.uri.removeprefix("sqlite:///"))
    away = file.with_name("away.db")

    def before(config):
        if config["seed"] == 1:
            file.rename(away)
            file.write_text("no database " * 1000)

    ranks.before = before
    assert cli.main(["train", "-m", *SMALL, "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    printed = capfd.readouterr()
    lines = (printed.out + printed.err).splitlines()
    assert [line for line in lines if "Traceback" in line] == []
    assert sum("poseidon log" in line for line in lines) >= 1
    reference = read_json(Path("sweep/1/summary.json"))["mlflow"]
    assert (reference["run_id"], reference["parent_id"]) == (
        None,
        read_json(Path("sweep/0/summary.json"))["mlflow"]["parent_id"],
    )
    away.replace(file)
    assert cli.main(["log", "sweep/0", "sweep/1"]) == 0
    jobs = runs(store, "mlp-digits")
    assert {run.info.status for run in jobs} == {"FINISHED"}
    assert [run.data.tags["mlflow.parentRunId"] for run in jobs] == [reference["parent_id"]] * 2


def test_the_axes_of_a_large_sweep_are_cut_to_json_that_fits_a_tag():
    axes = {"seed": [str(i) for i in range(10_000)], "+model.x": ["y" * 100] * 500, "comm": ["ps"]}
    tag = _axes_tag(axes)
    assert len(tag) < 5000
    found = json.loads(tag)
    assert found["seed"][0] == "0"
    assert found["seed"][-1].endswith(" more")
    assert (found["comm"], len(found["model.x"])) == (["ps"], len(found["seed"]))


def test_what_only_a_sweeper_knows_is_shown_as_it_stands(store, ranks):
    assert cli.main(["train", "-m", *SMALL, "comm=glob(p*s)", "comm.overlap=backward"]) == 0
    (parent,) = runs(store, "mlp-digits", "sweep")
    assert json.loads(parent.data.tags["poseidon.axes"]) == {"comm": ["glob(p*s)"]}
    assert [run.data.tags["mlflow.parentRunId"] for run in runs(store, "mlp-digits")] == [parent.info.run_id]


def test_logging_arguments(store, capsys, tmp_path):
    assert cli.main(["log"]) == 2
    assert cli.main(["log", "--help"]) == 0
    assert "usage" in capsys.readouterr().out
    for arguments in (["nowhere"], ["tracking.uri=sqlite:///x.db"], ["tracking.url=x"], ["."]):
        assert cli.main(["log", *arguments]) == 2
        message = capsys.readouterr().err
        assert message.startswith("poseidon log: ")
        assert message.count("\n") == 1
