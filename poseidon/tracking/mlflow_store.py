"""An MLflow store, ready to take runs. MLflow, which takes a second or more to import, is imported on first use.

Only the launching process opens one, before it starts anything. Runs are addressed by their ids throughout;
MLflow's fluent interface, with its active run and MLFLOW_RUN_ID, is not used.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from poseidon.errors import UserError
from poseidon.tracking.sqlite import prepare
from poseidon.tracking.where import ARTIFACTS, is_server, shown, sqlite_file

#: Unless the user says otherwise. MLflow's own patience with a server that is down is minutes.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what goes wrong is said here, in one line
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
#: Seconds that a store may take to open. A database may have to be set up first.
_PATIENCE, _DATABASE_PATIENCE = 15.0, 120.0
_LONGEST_NAME = 500

T = TypeVar("T")


class StoreError(UserError):
    """A store cannot be used.

    Attributes:
        reason: why, in a few words.
    """

    def __init__(self, uri: str, reason: str) -> None:
        start = "start its server, or " if is_server(uri) else ""
        super().__init__(
            f"cannot use the run store {shown(uri)}: {reason}; {start}name another with tracking.uri=... (or "
            f"MLFLOW_TRACKING_URI)"
        )
        self.reason = reason


class Store:
    """A store by its address; :meth:`open` makes sure that it is there.

    Attributes:
        uri: as :func:`poseidon.tracking.where.store_uri` gives it.
        client: an ``MlflowClient``.
    """

    def __init__(self, uri: str, client: Any) -> None:
        self.uri = uri
        self.client = client

    @classmethod
    def open(cls, uri: str) -> Store:
        """Opens the store; an SQLite file that is not there is made first, by one process of several.

        Raises:
            StoreError: it cannot be used, or has not answered in time.
        """
        patience = _PATIENCE if is_server(uri) else _DATABASE_PATIENCE
        return within(patience, lambda: cls._open(uri), uri)

    @classmethod
    def _open(cls, uri: str) -> Store:
        client_class = import_client()
        file = sqlite_file(uri)
        if file is not None:
            prepare(file)
        store = cls(uri, client_class(tracking_uri=uri))
        store.client.get_experiment_by_name("Default")  # any request will do
        return store

    def experiment(self, name: str) -> str:
        """The id of the experiment of that name, which is made if there is none.

        Raises:
            UserError: there is one, but deleted; or the name cannot be one.
            StoreError: the store cannot be used.
        """
        if len(name) > _LONGEST_NAME:
            raise UserError(f"tracking.experiment: a name has at most {_LONGEST_NAME} characters, not {len(name)}")
        found = within(_PATIENCE, lambda: self._experiment(name), self.uri)
        if found.lifecycle_stage == "deleted":
            raise UserError(
                f"tracking.experiment={name}: an experiment of that name was deleted from {shown(self.uri)}; give "
                f"another name, or bring it back: MLFLOW_TRACKING_URI={shown(self.uri)} mlflow experiments restore "
                f"--experiment-id {found.experiment_id}"
            )
        return str(found.experiment_id)

    def _experiment(self, name: str) -> Any:
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return found
        try:
            self.client.create_experiment(name, artifact_location=_artifacts(self.uri))
        except Exception:  # another job may have made it a moment before
            found = self.client.get_experiment_by_name(name)
            if found is None:
                raise
        return found or self.client.get_experiment_by_name(name)


def import_client() -> Any:
    """The class ``MlflowClient``, of an MLflow that keeps quiet."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    if os.environ["MLFLOW_LOGGING_LEVEL"] == _ENVIRONMENT["MLFLOW_LOGGING_LEVEL"]:
        for library in ("mlflow", "urllib3"):  # Hydra would show what they tell of each attempt
            logging.getLogger(library).setLevel(logging.CRITICAL)
    return MlflowClient


def within(seconds: float, work: Callable[[], T], uri: str) -> T:
    """The result of ``work`` if it comes in time. MLflow has no deadline for a request with its retries.

    Raises:
        StoreError: it failed, or takes longer. It goes on then, unheeded, in a thread that ends with the process.
    """
    done: list[T] = []
    failed: list[Exception] = []

    def body() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=body, name="mlflow", daemon=True)
    thread.start()
    thread.join(seconds)
    if done:
        return done[0]
    if not failed:
        raise StoreError(uri, f"no answer within {seconds:.0f} s")
    if isinstance(failed[0], UserError):
        raise failed[0]
    raise StoreError(uri, explain(failed[0], uri)) from failed[0]


def explain(error: Exception, uri: str = "") -> str:
    """What MLflow, its database or the network raised, in a few words."""
    if isinstance(error, StoreError):
        return error.reason
    text = str(error)
    system = re.search(r"\[Errno -?\d+\] (?P<reason>[^'\")\]]+)", text)
    if system:
        return system["reason"].lower()
    if "timed out" in text.lower():
        return "timed out"
    if "out-of-date database schema" in text:
        return (
            f"another version of MLflow made it: after a copy, bring it up to date by `mlflow db upgrade {shown(uri)}`"
        )
    if "unsupported URI" in text:
        return "MLflow knows no such kind of address; sqlite:///FILE and http://HOST:PORT are some that it knows"
    if isinstance(error, ModuleNotFoundError):
        return f"it needs the Python package {error.name}"
    first = re.sub(r"^\([\w.]+\) ", "", text.strip().partition("\n")[0])  # SQLAlchemy begins with the driver's class
    return " ".join(shown(first).split())[:300] or type(error).__name__


def _artifacts(uri: str) -> str | None:
    """Where an experiment's artifacts go. A server decides for itself; MLflow's client would take ./mlruns else."""
    file = sqlite_file(uri)
    if file is not None:
        return (file.parent / ARTIFACTS).as_uri()
    if uri.startswith(("postgresql", "mysql", "mssql")):
        return Path(ARTIFACTS).absolute().as_uri()
    return None
