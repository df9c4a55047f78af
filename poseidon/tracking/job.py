"""One run's tracking from the launching process's side: the store before anything starts, a thread, the last lines."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poseidon.config.schema import TrainConfig
from poseidon.errors import UserError
from poseidon.tracking.follow import Follower
from poseidon.tracking.mlflow_store import Store
from poseidon.tracking.overview import look
from poseidon.tracking.summary import default_experiment
from poseidon.tracking.sweep import Sweep, connect
from poseidon.tracking.upload import Upload
from poseidon.tracking.where import shown, store_uri

#: Seconds in which a run must be there before its ranks start.
_PATIENCE = 30.0


class Tracking:
    """Keeps a run in MLflow; does nothing at all if ``tracking.mlflow`` is false.

    A store that cannot be used is an error as long as nothing has started. The jobs of a sweep have started with
    the first of them: later ones leave their files, and say how to log them.

    Args:
        say: shows a line while the run goes on.

    Raises:
        UserError: the store or the experiment cannot be used.
    """

    def __init__(self, config: TrainConfig, sweep: Sweep, say: Callable[[str], None]) -> None:
        self._sweep, self._say = sweep, say
        self._follower: Follower | None = None
        self._folder = Path()
        self._failure: str | None = None
        self._store: tuple[Store, str] | None = None
        self._on = config.tracking.mlflow
        if not self._on:
            return
        self._config = config
        self._uri = store_uri(config.tracking.uri)
        self._experiment = config.tracking.experiment or sweep.experiment or default_experiment([config])
        try:
            self._connect()
        except UserError:
            if self._parent is None:
                raise

    @property
    def reference(self) -> dict[str, Any] | None:
        """Where the run is in MLflow; ``run_id`` is None as long as it is not there."""
        if not self._on:
            return None
        return {
            "uri": shown(self._uri),
            "experiment_id": self._store[1] if self._store else None,
            "run_id": self._follower.run_id if self._follower else None,
            "parent_id": self._parent,
        }

    def begin(self, folder: Path) -> dict[str, Any] | None:
        """Makes the run of a folder whose first records are written, and follows it. The :attr:`reference`.

        Raises:
            UserError: it cannot be made.
        """
        if not self._on:
            return None
        self._folder = folder
        follower = Follower(self._make, self._say)
        begun = follower.begin(_PATIENCE)
        if not begun and self._parent is None:
            follower.give_up()
            raise UserError(
                f"cannot make a run in {shown(self._uri)}: {follower.failure}; mend that, or train without: "
                f"tracking.mlflow=false"
            )
        self._follower = follower
        if not begun:
            self._say(f"mlflow: {follower.failure}; the run starts all the same, its records are files")
        return self.reference

    def end(self) -> None:
        """Logs the rest, once the folder is complete."""
        if self._follower is None:
            return
        try:
            self._failure = self._follower.end()
        except KeyboardInterrupt:
            self._follower.give_up()
            self._failure = "interrupted"
            self._say(self.lines()[0])
            raise

    def lines(self) -> list[str]:
        """Where the run is, or how to get it there."""
        upload = self._follower.upload if self._follower else None
        if self._follower is None:
            return []
        if self._failure is not None or upload is None:
            again = shlex.join(["poseidon", "log", str(self._folder)])
            return [f"mlflow: not all is logged ({self._failure}); the files are whole. To log them later: {again}"]
        where = look(self._uri, upload.experiment_id, upload.run_id)
        return [f"mlflow: experiment {self._experiment}, run {upload.name}; to see it: {where}"]

    @property
    def _parent(self) -> str | None:
        return self._sweep.parent(self._uri, self._experiment)

    def _connect(self) -> tuple[Store, str]:
        if self._store is None:
            self._store = connect(self._config, self._sweep.experiment)
        return self._store

    def _make(self) -> Upload:
        store, experiment_id = self._connect()
        return Upload(store, experiment_id, self._folder, self._parent, self._sweep.axes)
