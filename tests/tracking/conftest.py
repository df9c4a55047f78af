from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from poseidon.tracking.mlflow_store import Store, import_client
from poseidon.tracking.sqlite import prepare


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_client()
    file = tmp_path_factory.mktemp("template") / "mlflow.db"
    prepare(file)
    return file


@pytest.fixture
def store(_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store of the test's own, which is the default one."""
    folder = tmp_path / "store"
    folder.mkdir()
    shutil.copy(_template, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return Store.open(uri)


def make_run(folder: Path, metrics: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """A run's folder, as small as it can be."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "status": "completed",
        "error": None,
        "degree": "real",
        "comm": "hybrid",
        "nodes": 2,
        "model": "mlp",
        "dataset": "digits",
        "experiment": "mlp-digits",
        "iterations": 20,
        "images_per_second": 1000.0,
        "iteration_seconds": {"median": 0.03, "p10": 0.02, "p90": 0.04},
        "bytes_sent_per_iteration": [110.0, 120.0],
        "bytes_by_scheme": {"ps": 40.0, "sfb": 60.0},
        "stall_seconds": None,
        "throughput_only": False,
        "oversubscribed": True,
        "overrides": ["comm=hybrid", "seed=1"],
        "started": "2026-01-31T12:00:00+00:00",
        "ended": "2026-01-31T12:00:09+00:00",
        "git_commit": "abc",
        "host": {"name": "here", "cpu": "a CPU", "cores": 2},
        "mlflow": None,
    }
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    (folder / "config.yaml").write_text(yaml.safe_dump({"comm": {"name": "hybrid"}, "seed": 1}))
    (folder / "overrides.yaml").write_text("[comm=hybrid]\n")
    (folder / "spec.json").write_text(json.dumps({"run_dir": str(folder.absolute())}))
    lines = METRICS if metrics is None else metrics
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plan.json").write_text("[{}]")
    return folder


METRICS = [
    {"iteration": 10, "epoch": 0.5, "wall_s": 0.25, "train_loss": 2.0, "lr": 0.1, "mb_per_second": None},
    {"iteration": 20, "epoch": 1.0, "wall_s": 0.5, "train_loss": 1.0, "lr": 0.1, "mb_per_second": 3.0},
    {"iteration": 20, "epoch": 1.0, "wall_s": 0.6, "eval_accuracy": 0.9, "eval_loss": 0.3},
]


def runs(store: Store, experiment: str, kind: str = "run") -> list[Any]:
    """Of one kind, the newest first."""
    found = store.client.get_experiment_by_name(experiment)
    if found is None:
        return []
    return list(store.client.search_runs([found.experiment_id], f"tags.`poseidon.kind` = '{kind}'"))


def environment(**changes: str) -> dict[str, str]:
    """Of a command that imports poseidon from this checkout."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **changes}
