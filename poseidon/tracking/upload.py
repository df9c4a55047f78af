"""Brings a run's folder into an MLflow store: as the run goes, at its end, or long after it. All can be repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from poseidon.errors import UserError
from poseidon.tracking import content
from poseidon.tracking.folder import CONFIG, FIGURES, METRICS, OVERRIDES, PLAN, SPEC, SUMMARY, read_json
from poseidon.tracking.mlflow_store import Store

#: MLflow takes so many in one request.
_PARAMS, _METRICS = 100, 1000


class Upload:
    """One run folder and its run in a store; MLflow's and the network's exceptions come as they are.

    Args:
        store: an open store.
        experiment_id: where the run is made, unless it is there already.
        folder: of a run, with a summary in it.
        parent: run id of the sweep that the run belongs to.
        axes: keys that the sweep varies, for the run's name.

    Attributes:
        run_id: None until the run is there.
        name: the run's.
    """

    def __init__(
        self, store: Store, experiment_id: str, folder: Path, parent: str | None = None, axes: Sequence[str] = ()
    ) -> None:
        self.store, self.experiment_id, self.folder, self.parent = store, experiment_id, folder, parent
        self.run_id: str | None = None
        self._described = False
        self._config = read_config(folder)
        self._summary = read_summary(folder)
        self._started = content.milliseconds(self._summary.get("started"))
        self._offset = 0
        self.name = content.run_name(self._summary, self._config, axes)

    def begin(self) -> None:
        """Makes the run, with tags and params."""
        if self.run_id is None:
            run = self.store.client.create_run(
                self.experiment_id, start_time=self._started or None, tags=self._tags(), run_name=self.name
            )
            self.run_id = run.info.run_id
        if not self._described:
            self._log_params()
            self._described = True

    def find(self) -> bool:
        """Takes up the run of this folder if the experiment has it already (and it was not deleted)."""
        mine, token = self._tags(), None
        while True:
            page = self.store.client.search_runs(
                [self.experiment_id],
                f"tags.`poseidon.started` = '{mine.get('poseidon.started', '')}'",
                page_token=token,
            )
            for run in page:
                same = ("poseidon.kind", "poseidon.run_dir", "poseidon.host")
                if all(run.data.tags.get(key) == mine.get(key) for key in same):
                    self.run_id, self._described = run.info.run_id, False
                    return True
            token = page.token
            if not token:
                return False

    def advance(self) -> None:
        """Logs the lines of metrics.jsonl that have come since the last time."""
        path = self.folder / METRICS
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            while True:
                read = list(itertools.islice(file, 100))
                lines = [line for line in read if line.endswith(b"\n")]  # all but one that is being written
                points = [p for line in lines for p in content.progress(line.decode(errors="replace"), self._started)]
                self._log_metrics(points)
                self._offset += sum(map(len, lines))  # only now: what failed is logged again, which changes nothing
                if not lines or len(lines) < len(read):
                    return

    def end(self) -> None:
        """Logs what is known at the end, the run's files and how it ended."""
        client, run_id = self.store.client, self.run_id
        self._summary = read_summary(self.folder)
        self._log_metrics(content.final(self._summary))
        self._log(tags=self._tags())
        for path, place in artifacts(self.folder):
            client.log_artifact(run_id, str(path), place)
        status = content.STATUS.get(str(self._summary.get("status")), "FAILED")
        if status == "RUNNING":
            client.update_run(run_id, status=status)
        else:
            client.set_terminated(run_id, status, content.milliseconds(self._summary.get("ended")) or None)

    def all(self) -> None:
        self.begin()
        self.advance()
        self.end()

    def _tags(self) -> dict[str, str]:
        found = content.tags(self._summary, original_place(self.folder), self._config)
        return found if self.parent is None else {**found, "mlflow.parentRunId": self.parent}

    def _log_params(self) -> None:
        client = self.store.client
        there = client.get_run(self.run_id).data.params  # a param never changes
        # What comm=single really had, whatever cluster.nodes and trainer.batch_size say.
        had = {key: str(self._summary[key]) for key in ("nodes", "global_batch") if key in self._summary}
        wanted = content.params(self._config) | had
        missing = {key: value for key, value in wanted.items() if key not in there}
        for some in _batches(list(missing.items()), _PARAMS):
            self._log(params=dict(some))

    def _log_metrics(self, points: Sequence[content.Point]) -> None:
        from mlflow.entities import Metric

        for some in _batches(points, _METRICS):
            self.store.client.log_batch(self.run_id, metrics=[Metric(*point) for point in some])

    def _log(self, params: dict[str, str] | None = None, tags: dict[str, str] | None = None) -> None:
        from mlflow.entities import Param, RunTag

        self.store.client.log_batch(
            self.run_id,
            params=[Param(*item) for item in (params or {}).items()],
            tags=[RunTag(*item) for item in (tags or {}).items()],
        )


def read_summary(folder: Path) -> dict[str, Any]:
    """Raises UserError if the folder is no run's."""
    try:
        summary = read_json(folder / SUMMARY)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: its {SUMMARY} cannot be read: {error}") from error
    if not isinstance(summary, dict) or "status" not in summary:
        raise UserError(f"{folder}: is no run's folder: it has no {SUMMARY} of a run")
    return summary


def read_config(folder: Path) -> dict[str, Any]:
    """{} if the run did not come so far as to write it."""
    from omegaconf import OmegaConf

    path = folder / CONFIG
    config = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    return {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}


def original_place(folder: Path) -> str:
    """The folder's path when the run was made, which tells a run from others also in a copy of its folder."""
    try:
        spec = read_json(folder / SPEC)
    except (OSError, ValueError):
        spec = None
    place = spec.get("run_dir") if isinstance(spec, dict) else None
    return str(place or folder.absolute())


def artifacts(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """The files of a run that MLflow keeps too, and the folder in which it does (None: at the top)."""
    for name in (SUMMARY, PLAN, CONFIG, OVERRIDES, METRICS):
        path = folder / name
        if path.is_file() and not (name == PLAN and read_json(path) == []):
            yield path, None
    for path in sorted((folder / FIGURES).glob("*.png")):
        yield path, FIGURES


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
