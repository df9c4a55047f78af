"""One MLflow store for all tests of the report, which only read it: making one takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from poseidon.config.schema import ReportConfig
from poseidon.reporting import make_report
from poseidon.reporting.runs import Run
from tests.reporting.fakes import Fake, fake, p17, write

BIG = {"model": "vgg19_22k", "dataset": "synthetic", "classes": 21841, "throughput_only": True, "evaluations": 0}
OTHER = {"name": "node9", "cpu": "Intel Xeon", "cores": 4, "memory": 2**34, "os": "Linux-5"}
DIED = "rank 2 died: <killed> & gone"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of a store with the experiments that are named below."""
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    for name, fakes in experiments().items():
        write(uri, name, fakes, folder)
    return uri


def experiments() -> dict[str, list[Fake]]:
    speeds = {("ddp", 2): 1500, ("hybrid", 1): 990, ("hybrid", 2): 1900, ("hybrid", 4): 3000}
    sweep = [fake("single", seed=seed, speed=1000 + 10 * seed) for seed in range(3)]
    sweep += [
        fake(comm, nodes, seed, speed=speed + 100 * seed, oversubscribed=nodes == 4)
        for (comm, nodes), speed in speeds.items()
        for seed in range(3 if (comm, nodes) == ("hybrid", 2) else 1)
    ]
    sweep += [
        fake("hybrid", 4, 7, speed=9e9, status="failed", error=DIED),
        fake("hybrid", 4, 8, speed=9e9, status="running"),
        fake("hybrid", 4, 9, speed=9e9, status="interrupted", error="Ctrl-C"),
        fake("hybrid", 2, 0, speed=50, host=OTHER),
    ]
    lost, parent, foreign = fake("ps", 2, speed=9e9), fake(speed=9e9), fake(speed=9e9)
    lost.artifact = False
    parent.kind, foreign.kind = "sweep", "something else"
    without = ("model=lenet", "trainer.batch_size=16", "+tracking.run_name=x", "hydra.run.dir=here")
    return {
        "sweep": [*sweep, lost, parent, foreign],
        "theirs": [fake("single", speed=2.0, **BIG), fake("hybrid", 2, speed=3.9, **BIG)],
        "theirs emulated": _emulated(),
        "theirs without baseline": [p17("hybrid", 8, 1.0, overrides=("cluster.time_dilation=auto",))],
        "no baseline": [
            fake("ps", n, s, overrides=(*without, "comm.overlap=none"), batch_size=16) for n in (1, 2) for s in (0, 1)
        ],
        "one": [fake("single", evaluations=0, points=1)],
        "nothing measured": [
            fake("single", speed=None, points=0, evaluations=0),
            fake("ps", 2, speed=None, points=0, evaluations=1),
        ],
        "all failed": [fake("ps", 2, status="failed", error="no"), fake("ps", 2, 1, status="running")],
        "not ours": [foreign],
    }


def _emulated() -> list[Fake]:
    """Two links, three dilations, and a real run."""
    fakes = [p17("single", 1, 0.925), p17("ps", 8, 3.5, "none"), p17("ps", 8, 1.3), p17("ddp", 8, 1.1)]
    fakes += [p17("hybrid", n, 0.95, engine_bound=n == 8, cpu_bound=False) for n in (2, 4, 8)]
    fakes += [p17("hybrid", 2, 0.94, dilation=16), p17("hybrid", 2, 1.02, dilation=1)]
    return [*fakes, p17("hybrid", 8, 1.5, link="2gbit"), fake("ps", 2)]


@dataclass
class Made:
    """A report, and what the terminal saw."""

    folder: Path
    page: str
    printed: str

    def rows(self, file: str) -> list[dict[str, str]]:
        lines = (self.folder / "data" / file).read_text(encoding="utf-8").splitlines()
        names, *rest = (line.split(",") for line in lines)  # of files whose cells have no comma
        return [dict(zip(names, cells, strict=True)) for cells in rest]


@pytest.fixture
def report(store: str, tmp_path: Path) -> Callable[..., Made]:
    """Makes the report of an experiment; keywords are options of ``report``."""

    def make(experiment: str | None, **options: Any) -> Made:
        return make_in(tmp_path / "reports", store, experiment, **options)

    return make


def make_in(reports: Path, store: str, experiment: str | None, **options: Any) -> Made:
    config = ReportConfig()
    config.tracking.uri, config.report.experiment, config.report.folder = store, experiment, str(reports)
    for key, value in options.items():
        setattr(config.report, key, value)
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    index = make_report(config, console)
    return Made(index.parent, index.read_text(encoding="utf-8"), console.export_text())


@pytest.fixture(scope="session")
def sweep(store: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_in(tmp_path_factory.mktemp("reports"), store, "sweep")


def as_run(one: Fake) -> Run:
    """As the store gives it."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in one.lines:
        kind = "train" if "train_loss" in line else "eval"
        names = {"train_loss": "train/loss", "eval_accuracy": "eval/accuracy", "wall_s": f"{kind}/wall_s"}
        for key, metric in names.items():
            if key in line:
                curves.setdefault(metric, []).append((line["iteration"], line[key]))
    summary = json.loads(json.dumps(one.summary))
    histories = {metric: tuple(points) for metric, points in curves.items()}
    return Run("id", "name", summary["status"], summary["error"], summary, one.params, histories)
