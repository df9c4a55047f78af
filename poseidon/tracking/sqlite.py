"""An SQLite store's file: made whole by one of several processes that start at once, or found usable."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from poseidon.tracking.where import ARTIFACTS

#: Seconds to wait for another process that makes the file, or writes to it.
_MAKING, _WRITING = 90.0, 20.0


def prepare(file: Path) -> None:
    """Makes the store if there is none, in one go: whoever sees the file sees all of its tables.

    MLflow's own way fails when several processes set up one file, and one that was interrupted leaves a file
    that nobody can use.

    Raises:
        OSError: the file cannot be made, read or written.
        sqlite3.Error: it is no database, or not to be written to.
    """
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent}")
    if not _is_there(file):
        with _lock(file):
            if not _is_there(file):
                _make(file)
    if not os.access(file.parent, os.W_OK):
        raise PermissionError(f"the folder {file.parent} is read-only")
    database = sqlite3.connect(f"file:{quote(str(file))}?mode=rw", uri=True, timeout=_WRITING)
    with contextlib.closing(database):
        database.execute("BEGIN IMMEDIATE")  # fails where MLflow would, but at once: it tries again for minutes
        database.rollback()


def _is_there(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _make(file: Path) -> None:
    store_module: Any = import_module("mlflow.store.tracking.sqlalchemy_store")
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        store_module.SqlAlchemyStore(f"sqlite:///{part}", (file.parent / ARTIFACTS).as_uri()).engine.dispose()
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Held by one process at a time; a file beside the store that is gone afterwards."""
    path = file.with_name(f"{file.name}.lock")
    deadline = time.monotonic() + _MAKING
    while True:
        held = path.open("w")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(held.fileno()), path.stat()):
                break
        except BlockingIOError:
            pass
        held.close()  # it is another's, or one that its holder has removed meanwhile
        if time.monotonic() >= deadline:
            raise TimeoutError(f"another process has held {path} for {_MAKING:.0f} s")
        time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        held.close()
