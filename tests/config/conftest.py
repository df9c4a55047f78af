from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from poseidon.config.schema import TrainConfig
from poseidon.training import job

CUSTOM = Path(__file__).resolve().parents[2] / "examples" / "custom"


@dataclasses.dataclass
class Asked:
    """One call of run_job."""

    config: TrainConfig
    overrides: list[str]
    folder: Path


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    GlobalHydra.instance().clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Training is replaced by taking notes; each run succeeds."""
    return note(monkeypatch, lambda config: 0)


def note(monkeypatch: pytest.MonkeyPatch, exit_code: Callable[[TrainConfig], int]) -> list[Asked]:
    calls: list[Asked] = []

    def run_job(config: Any, overrides: Any, folder: Path) -> job.JobOutcome:
        calls.append(Asked(config, list(overrides), folder))
        return job.JobOutcome(exit_code(config), 0.5, folder)

    monkeypatch.setattr(job, "run_job", run_job)
    return calls
