"""A sweep's place in MLflow: one experiment for jobs that name none, and a parent run for the jobs of each experiment.

The process that starts the sweep makes them before the first job. What a job needs to know travels in its
environment, so that jobs may run in other processes. Jobs say where they left their records in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from poseidon.config.schema import TrainConfig
from poseidon.errors import UserError
from poseidon.tracking import content
from poseidon.tracking.facts import git_state
from poseidon.tracking.folder import SUMMARY, read_json
from poseidon.tracking.mlflow_store import Store, StoreError, within
from poseidon.tracking.overview import hints, table
from poseidon.tracking.summary import default_experiment
from poseidon.tracking.where import store_uri

_VARIABLE = "POSEIDON_SWEEP"
#: Values of an axis that are spelt out.
_MANY = 100
_PATIENCE = 15.0
#: Exit codes after SIGHUP, SIGINT and SIGTERM.
_SIGNALLED = (129, 130, 143)

#: Swept key -> its values, as they stand on the command line.
Axes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Sweep:
    """What a job knows of its sweep.

    Attributes:
        experiment: of jobs that name none; None if each is to choose its own.
        axes: the swept keys.
        parents: store -> experiment -> id of the parent run.
        jobs: file that takes the folder of each job; None outside a sweep.
        dilation: of its jobs with cluster.time_dilation=auto; None if there are none.
    """

    experiment: str | None = None
    axes: list[str] = field(default_factory=list)
    parents: dict[str, dict[str, str]] = field(default_factory=dict)
    jobs: str | None = None
    dilation: float | None = None

    @classmethod
    def current(cls) -> Sweep:
        """The sweep that this process is a job of; an empty one outside of sweeps."""
        text = os.environ.get(_VARIABLE)
        return cls(**json.loads(text)) if text else cls()

    def parent(self, uri: str, experiment: str) -> str | None:
        return self.parents.get(uri, {}).get(experiment)

    def note(self, run_dir: Path) -> None:
        """Says that a job has left its records there."""
        if self.jobs is None:
            return
        with contextlib.suppress(OSError), open(self.jobs, "a", encoding="utf-8") as file:
            file.write(json.dumps(str(run_dir)) + "\n")

    def summaries(self) -> list[dict[str, Any]]:
        """Of the jobs that have ended, in the order of their ends."""
        path = Path(self.jobs or "")
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found = [read_json(Path(json.loads(line)) / SUMMARY) for line in lines]
        return [summary for summary in found if summary]


def run_tracked(
    configs: Sequence[TrainConfig], axes: Axes | None, body: Callable[[], int], dilation: float | None = None
) -> int:
    """Runs one job, or a sweep's (``axes`` is not None), with its store opened before anything starts.

    Args:
        configs: of the jobs, as far as they are known beforehand.
        body: runs the jobs and gives the exit code.
        dilation: of all jobs of a sweep that leave it to the sweep.

    Raises:
        UserError: the store cannot be used; nothing has been started.
    """
    if axes is None:
        for config in configs:
            if config.tracking.mlflow:
                connect(config)
        return body()
    with TemporaryDirectory(prefix="poseidon-sweep-") as folder, _terminable():
        sweep = replace(_begin(configs, axes, Path(folder) / "jobs"), dilation=dilation)
        status = "failed"
        try:
            with _environment(sweep):
                code = body()
            status = "completed" if code == 0 else "interrupted" if code in _SIGNALLED else "failed"
            return code
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        finally:
            _end(sweep, status)
            _show(sweep)


def connect(config: TrainConfig, default: str | None = None) -> tuple[Store, str]:
    """The store of a config and the id of its experiment, which is made if need be.

    Raises:
        UserError: it cannot be used; says what to do.
    """
    try:
        store = Store.open(store_uri(config.tracking.uri))
        return store, store.experiment(config.tracking.experiment or default or default_experiment([config]))
    except StoreError as error:
        raise UserError(f"{error}, or train without: tracking.mlflow=false") from error


def _begin(configs: Sequence[TrainConfig], axes: Axes, jobs: Path) -> Sweep:
    default = default_experiment(configs) if configs else None
    parents: dict[str, dict[str, str]] = {}
    for config in configs:
        if not config.tracking.mlflow:
            continue
        there = parents.setdefault(store_uri(config.tracking.uri), {})
        experiment = config.tracking.experiment or default or default_experiment([config])
        if experiment not in there:
            store, number = connect(config, default)
            there[experiment] = within(_PATIENCE, partial(_make_parent, store, number, axes), store.uri)
    return Sweep(default, list(axes), parents, str(jobs))


def _make_parent(store: Store, experiment_id: str, axes: Axes) -> str:
    said = [f"{key}={','.join(values)}" for key, values in axes.items()]
    name = content.short(" ".join(["sweep", *said]))
    tags = {
        **content.source(git_state()["git_commit"], " ".join(["poseidon train -m", *said])),  # type: ignore[arg-type]
        "poseidon.kind": "sweep",
        "poseidon.status": "running",
        "poseidon.host": socket.gethostname(),
        "poseidon.axes": _axes_tag(axes),
    }
    run = store.client.create_run(experiment_id, tags=content.plain_tags(tags), run_name=name)
    return str(run.info.run_id)


def _axes_tag(axes: Axes) -> str:
    """As JSON that stays whole within a tag."""
    many = _MANY
    while True:
        cut = {
            key.lstrip("+"): [*values[:many], *([f"... {len(values) - many} more"] if len(values) > many else [])]
            for key, values in axes.items()
        }
        text = json.dumps(cut)
        if len(text) <= 4000 or many == 1:
            return text
        many //= 2


def _end(sweep: Sweep, status: str) -> None:
    """Ends the parents. A store that fails now costs nothing but a warning."""

    def work(uri: str, runs: Sequence[str]) -> None:
        client = Store.open(uri).client
        for run_id in runs:
            client.set_tag(run_id, "poseidon.status", status)
            client.set_terminated(run_id, content.STATUS[status])

    for uri, parents in sweep.parents.items():
        try:
            within(_PATIENCE, partial(work, uri, list(parents.values())), uri)
        except UserError as error:
            print(f"mlflow: the sweep's own run stays open: {error}", file=sys.stderr, flush=True)


def _show(sweep: Sweep) -> None:
    """What came of the jobs, and how to see more of it."""
    from rich.console import Console

    summaries = sweep.summaries()
    if not summaries:
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print()
    console.print(table(summaries, sweep.axes))
    for uri, parents in sweep.parents.items():
        for command in hints(uri, list(parents)):
            console.print(f"to compare them: {command}", markup=False)


@contextlib.contextmanager
def _environment(sweep: Sweep) -> Iterator[None]:
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = json.dumps(asdict(sweep))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Between its jobs too, SIGTERM ends a sweep by an exception, so that its parent run does not stay open."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
