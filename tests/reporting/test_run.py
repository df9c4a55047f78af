"""The picture of a single run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from poseidon.reporting import run_figures
from tests.reporting.fakes import fake


def written(folder, one):
    (folder / "summary.json").write_text(json.dumps(one.summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in one.lines))
    return folder


@pytest.mark.parametrize("points", [1, 8, 200])
def test_a_run_gets_its_picture(tmp_path, points):
    (file,) = run_figures(written(tmp_path, fake(points=points)))
    assert file == tmp_path / "figures" / "training.png"
    first = file.read_bytes()
    assert first.startswith(b"\x89PNG")
    run_figures(tmp_path)
    assert file.read_bytes() == first


def test_a_run_without_metrics_gets_none(tmp_path):
    assert run_figures(tmp_path) == []
    assert run_figures(written(tmp_path, fake(points=0, evaluations=0))) == []
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("metrics", "pictures"),
    [
        ("", 0),
        ("not json\n[1]\n", 0),
        ('{"iteration": 1, "wall_s": null, "train_loss": 1.0}\n', 0),
        ('{"iteration": 1, "wall_s": 1.0, "train_loss": "x"}\n', 0),
        ('{"iteration": 1, "wall_s": 1.0, "train_loss": NaN}\n', 0),
        ('{"iteration": 1, "wall_s": 1.0, "train_loss": 2.0}\n{"iteration": 2, "wa', 1),
        ('{"iteration": 0, "wall_s": 0.0, "eval_accuracy": 1.0}\n', 1),
        ('{"iteration": 1, "wall_s": 1.0, "train_loss": 1e300}\n{"iteration": 2, "wall_s": 1.0, "train_loss": 0}\n', 1),
    ],
)
@pytest.mark.parametrize("summary", ["{}", "broken", '{"host": 3, "nodes": null}'])
def test_odd_records_raise_nothing(tmp_path, metrics, pictures, summary):
    (tmp_path / "metrics.jsonl").write_text(metrics)
    (tmp_path / "summary.json").write_text(summary)
    assert len(run_figures(tmp_path)) == pictures


def test_a_folder_that_cannot_be_written_raises_nothing(tmp_path):
    (written(tmp_path, fake()) / "figures").write_text("a file")
    assert run_figures(tmp_path) == []


def test_importing_reporting_imports_nothing_heavy():
    heavy = "{'matplotlib', 'mlflow', 'pandas', 'torch', 'jinja2'} & set(sys.modules)"
    code = f"import sys, poseidon.reporting; print(sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
