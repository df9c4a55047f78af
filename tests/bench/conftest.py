"""Suites whose runs are imagined: each takes what the test says, by its comm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from poseidon.bench import runner
from poseidon.bench.plan import Plan, make_plan
from poseidon.bench.suite import Case
from poseidon.config.schema import TrainConfig
from poseidon.tracking.folder import write_json
from poseidon.training.job import JobOutcome

SUITE = """
what: imagined runs
pairs: 3
overrides: [model=mlp, dataset=digits]
cases:
  first:
    what: two ways
    variants:
      ps: [comm=ps]
      ddp: [comm=ddp]
    bars:
      - {variant: ps, over: ddp, at_least: 1.2, ideal: 1.5}
      - {variant: ps, figure: cpu_per_gb, at_most: 1.5}
"""


@pytest.fixture
def write(tmp_path) -> Callable[[str], str]:
    """Writes a suite's file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


@dataclass
class Imagined:
    """What runs take, and which were asked for.

    Attributes:
        seconds: of an iteration, by comm; or an exception to raise, an exit code to end with, or words of a failure.
    """

    seconds: dict[str, Any] = field(default_factory=lambda: {"ps": 1.0, "ddp": 1.5, "single": 1.0})
    asked: list[str] = field(default_factory=list)

    def run_job(self, config: TrainConfig, overrides: list[str], folder: Path, *, quiet: bool) -> JobOutcome:
        assert quiet
        assert not config.tracking.mlflow
        name = config.comm.name.value
        bucket = config.comm.ddp.bucket_cap_mb
        key = f"{name} {bucket:g}" if f"{name} {bucket:g}" in self.seconds else name
        self.asked.append(key)
        (folder / "logs").mkdir(parents=True)
        came = self.seconds[key]
        if isinstance(came, BaseException):
            raise came
        if isinstance(came, int):
            return JobOutcome(came, None, folder, summary(config, None, "interrupted", None))
        failed = isinstance(came, str)
        told = summary(config, None if failed else came, "failed" if failed else "completed", came if failed else None)
        write_json(folder / "summary.json", told)
        return JobOutcome(int(failed), None, folder, told)


def summary(config: TrainConfig, seconds: float | None, status: str, error: str | None) -> dict[str, Any]:
    timed = dict.fromkeys(("mean", "median", "p10", "p90"), seconds) | {"max": 2 * (seconds or 0)}
    return {
        "status": status,
        "error": error,
        "degree": "real",
        "comm": config.comm.name.value,
        "nodes": 2,
        "iteration_seconds": timed if seconds else None,
        "images_per_second": 64 / seconds if seconds else None,
        "cpu_seconds_per_iteration": 0.5,
        "bytes_sent_per_iteration": [2.5e8, 2e8],
        "bytes_source": "counted",
        "busiest_thread_seconds_per_iteration": [0.1, 0.2],
        "replica_digests": ["a", "a"],
        "cores_per_node": 0.5,
        "time_dilation": 1.0,
        "started": "2026-12-03T12:00:00+00:00",
        "git_commit": "0123456789abcdef",
        "host": {"name": "here", "cores": 2},
        "versions": {"torch": "2.14.1"},
        "schemes": {"a layer": "ps"},
    }


#: Composing configs takes longer than all else here.
_PLANS: dict[str, Plan] = {}


def planned(case: Case) -> Plan:
    if repr(case) not in _PLANS:
        _PLANS[repr(case)] = make_plan(case)
    return _PLANS[repr(case)]


@pytest.fixture
def imagined(monkeypatch) -> Imagined:
    found = Imagined()
    monkeypatch.setattr(runner, "make_plan", planned)
    monkeypatch.setattr(runner, "run_job", found.run_job)
    return found
