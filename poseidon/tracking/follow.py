"""Logs a run to MLflow while it goes on, in a thread of the launching process: training never waits for a store."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from poseidon.tracking.mlflow_store import explain
from poseidon.tracking.upload import Upload

#: Seconds between two looks at the run's metrics; after failures they become longer, up to the second.
INTERVAL, LONGEST_INTERVAL = 3.0, 60.0
#: Seconds that a finished run waits for the store.
PATIENCE = 30.0
_NICENESS = 10


class Follower:
    """Makes a folder's run in the store at once, adds to it as its metrics file grows, and ends it.

    Args:
        make: opens the store and gives the folder's upload; tried again as long as it fails.
        say: shows a line; told once if the store fails while the run goes on.
    """

    def __init__(self, make: Callable[[], Upload], say: Callable[[str], None]) -> None:
        self._make, self._say = make, say
        self.upload: Upload | None = None
        self.failure: str | None = None  # what went wrong at the last attempt
        self._begun, self._stop = threading.Event(), threading.Event()
        self._told = self._given_up = False
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)

    @property
    def run_id(self) -> str | None:
        return self.upload.run_id if self.upload else None

    def begin(self, patience: float) -> bool:
        """Whether the run is there, within ``patience`` seconds."""
        self._thread.start()
        if not self._begun.wait(patience):
            self.failure = f"no answer within {patience:.0f} s"
        return self.failure is None

    def give_up(self) -> None:
        """Leave it at what is logged."""
        self._given_up = True
        self._stop.set()

    def end(self, patience: float = PATIENCE) -> str | None:
        """Logs the rest, to which the folder must be complete. What went wrong, or None."""
        self._stop.set()
        self._thread.join(patience)
        if self._thread.is_alive():
            self._given_up = True
            return self.failure or f"the store took longer than {patience:.0f} s"
        return self.failure

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process: ranks come first
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        pause = INTERVAL
        while not self._given_up:
            ending = self._stop.is_set()
            try:
                self._sync(ending)
                self.failure, pause = None, INTERVAL
            except Exception as error:
                self.failure, pause = explain(error), min(2 * pause, LONGEST_INTERVAL)
                self._warn(ending)
            self._begun.set()
            if ending:
                return
            self._stop.wait(pause)

    def _sync(self, ending: bool) -> None:
        if self.upload is None:
            self.upload = self._make()
        self.upload.begin()
        self.upload.advance()
        if ending:
            self.upload.end()

    def _warn(self, ending: bool) -> None:
        if self._begun.is_set() and not (self._told or ending or self._given_up):
            self._told = True
            self._say(f"mlflow: {self.failure}; the run goes on, its records are files, and the store is tried again")
