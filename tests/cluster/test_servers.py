"""Ranks that only serve, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = [sys.executable, "-m", "poseidon", "train", "trainer.epochs=null", "tracking.mlflow=false", "cluster.nodes=2"]


def run(folder: Path, *overrides: str) -> dict:
    done = subprocess.run(
        [*TRAIN, "trainer.iterations=4", f"hydra.run.dir={folder}", *overrides],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_they_end_when_the_workers_have(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "comm=hybrid", "cluster.servers=1", "cluster.devices_per_node=2")
    assert (summary["status"], summary["servers"]) == ("completed", 1)
    assert summary["bytes_dense_per_iteration"] == pytest.approx(summary["bytes_planned_per_iteration"], rel=0.02)
    served = summary["server_bytes_dense_per_iteration"]
    assert served == pytest.approx(summary["server_bytes_planned_per_iteration"])
    assert len(served) == 1
    assert summary["server_bytes_sent_per_iteration"][0] > served[0] > 0
    assert len(set(summary["replica_digests"])) == 1
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 5


@pytest.mark.slow
def test_some_nodes_serve(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "comm=ps", "cluster.servers=[1]")
    assert summary["servers"] == [1]
    assert summary["server_bytes_sent_per_iteration"] is None
    assert summary["bytes_dense_per_iteration"] == pytest.approx(summary["bytes_planned_per_iteration"], rel=0.02)
