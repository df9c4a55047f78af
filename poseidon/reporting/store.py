"""Reads the runs of an experiment from an MLflow store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from poseidon.errors import UserError
from poseidon.reporting.runs import COMPLETED, History, Run
from poseidon.tracking.mlflow_store import Store, StoreError, explain
from poseidon.tracking.where import sqlite_file, store_uri

#: The curves that are drawn.
METRICS = ("train/loss", "train/wall_s", "eval/accuracy", "eval/loss", "eval/wall_s")
_PAGE = 1000


class Reader:
    """Reads an MLflow store.

    Attributes:
        uri: the store's address.

    Raises:
        UserError: from every method, if there is no store or it cannot be read.
    """

    def __init__(self, uri: str | None = None) -> None:
        self.uri = store_uri(uri)
        file = sqlite_file(self.uri)
        if file is not None and not file.is_file():  # it would be made
            raise UserError(
                f"there is no run store {file}: `poseidon train ...` in its folder makes one, or tracking.uri=... "
                f"(or MLFLOW_TRACKING_URI) names another"
            )
        self._client = Store.open(self.uri).client

    def experiments(self) -> list[str]:
        """Names of all experiments that hold runs of ours, sorted."""
        with self._errors():
            found = _pages(self._client.search_experiments)
            return sorted(e.name for e in found if self._search(e.experiment_id, _PAGE)[:1])

    def runs(self, experiment: str) -> list[Run]:
        """All jobs of an experiment, whatever became of them, in an order that depends on them only."""
        with self._errors():
            found = self._client.get_experiment_by_name(experiment)
            if found is None or found.lifecycle_stage == "deleted":
                return []
            with TemporaryDirectory() as folder:
                return [self._run(run, Path(folder)) for run in self._search(found.experiment_id)]

    def _search(self, experiment_id: str, at_most: int | None = None) -> list[Any]:
        query: dict[str, Any] = {
            "experiment_ids": [experiment_id],
            "filter_string": "tags.`poseidon.kind` = 'run'",
        }
        if at_most is not None:
            return list(self._client.search_runs(**query, max_results=1))
        runs = _pages(self._client.search_runs, **query)
        return sorted(runs, key=lambda run: (run.info.start_time or 0, run.info.run_id))

    def _run(self, run: Any, folder: Path) -> Run:
        tags, run_id = run.data.tags, run.info.run_id
        summary = self._summary(run_id, folder)
        status = str(summary.get("status") or tags.get("poseidon.status") or run.info.status.lower())
        error = summary.get("error") or tags.get("poseidon.error")
        if status == COMPLETED and not all(key in summary for key in ("comm", "nodes", "batch_size")):
            status, error = "unreadable", "its summary.json is missing or lacks comm, nodes or batch_size"
        return Run(
            run_id=run_id,
            name=str(tags.get("mlflow.runName") or run_id),
            status=status,
            error=None if error is None else " ".join(str(error).split()),
            summary=summary,
            params=dict(sorted(run.data.params.items())),
            histories=self._histories(run) if status == COMPLETED else {},
        )

    def _summary(self, run_id: str, folder: Path) -> dict[str, Any]:
        """{} if the run left none, which is so while it is running."""
        target = folder / run_id
        target.mkdir()
        try:
            file = self._client.download_artifacts(run_id, "summary.json", str(target))
            content = json.loads(Path(file).read_text(encoding="utf-8"))
        except Exception:  # what is raised for a missing file depends on where the artifacts are
            return {}
        return content if isinstance(content, dict) else {}

    def _histories(self, run: Any) -> dict[str, History]:
        found: dict[str, History] = {}
        for metric in METRICS:
            if metric in run.data.metrics:
                records = self._client.get_metric_history(run.info.run_id, metric)
                last = {r.step: r.value for r in sorted(records, key=lambda r: (r.step, r.timestamp, r.value))}
                found[metric] = tuple((step, value) for step, value in last.items() if abs(value) < float("inf"))
        return found

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """MLflow's and its database's errors in one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # MLflow's, SQLAlchemy's, or the HTTP client's
            raise StoreError(self.uri, explain(error, self.uri)) from error


def _pages(search: Any, **query: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(**query, max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
