"""Opening a store: once by several, and every reason why it cannot be used in one line."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from poseidon.errors import UserError
from poseidon.tracking import mlflow_store, sqlite
from poseidon.tracking.mlflow_store import Store, StoreError

from .conftest import environment

TOGETHER = """
import os, sys
from importlib import import_module
from poseidon.tracking.mlflow_store import Store, import_client
import_client(), import_module("mlflow.store.tracking.sqlalchemy_store")  # once, which is most of the time
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        print(Store.open(sys.argv[1]).experiment("e"), flush=True)
        os._exit(0)
    children.append(pid)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


def test_four_processes_that_open_a_fresh_store_together_all_succeed(tmp_path):
    folder = tmp_path / "a b%c#d"
    folder.mkdir()
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, uri], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1"] * 4, "")  # and MLflow keeps quiet
    assert sorted(path.name for path in folder.iterdir()) == ["mlflow.db"]
    client = Store.open(uri).client
    assert client.get_experiment("1").artifact_location == (folder / "mlartifacts").as_uri()


def test_a_store_whose_making_was_interrupted_is_made_again(store, tmp_path, monkeypatch):
    file = tmp_path / "mlflow.db"
    file.touch()  # as sqlite leaves it

    def fail(name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "import_module", fail)
        with pytest.raises(KeyboardInterrupt):
            sqlite.prepare(file)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mlflow.db"]
    assert Store.open(f"sqlite:///{file}").experiment("e") == "1"


def test_an_experiment_is_made_once(store):
    first = store.experiment("a/b c")
    assert store.experiment("a/b c") == first != store.experiment("other")


def test_an_experiment_that_another_made_a_moment_before_is_taken(store, monkeypatch):
    there = store.client.create_experiment("e")
    found = [None, store.client.get_experiment_by_name("e")]
    monkeypatch.setattr(store.client, "get_experiment_by_name", lambda name: found.pop(0))
    assert store.experiment("e") == there


def test_a_deleted_experiment_is_one_line_that_says_how_to_bring_it_back(store):
    number = store.experiment("gone")
    store.client.delete_experiment(number)
    with pytest.raises(UserError, match=f"gone.* was deleted .*restore --experiment-id {number}"):
        store.experiment("gone")


def test_a_name_that_is_too_long(store):
    with pytest.raises(UserError, match=r"tracking\.experiment"):
        store.experiment("x" * 501)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("sqlite:////nowhere/at/all/mlflow.db", "there is no folder /nowhere/at/all"),
        ("sqlite:////proc/mlflow.db", "/proc"),
        ("sqlite:///{tmp}", "unable to open"),
        ("sqlite:///{tmp}/text.db", "not a database"),
        ("htp://host", "knows no such kind of address"),
        ("mssql+nodriver://host/db", "mssql"),
        ("http://nosuchhost.invalid:5000", "name or service not known"),
    ],
)
def test_what_cannot_be_opened_is_one_line_in_a_short_time(uri, words, tmp_path, monkeypatch, capfd):
    (tmp_path / "text.db").write_text("hello " * 1000)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        Store.open(uri.format(tmp=tmp_path))
    assert time.monotonic() - begun < 20
    message = str(caught.value)
    assert words.lower() in message.lower()
    assert "MLFLOW_TRACKING_URI" in message
    assert "\n" not in message
    assert len(message) < 500
    assert capfd.readouterr() == ("", "")


def test_a_store_of_another_mlflow_says_how_to_bring_it_up_to_date(store, tmp_path):
    file = tmp_path / "old.db"  # one that this process has not opened yet
    shutil.copy(store.uri.removeprefix("sqlite:///"), file)
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'old'")
    with pytest.raises(StoreError, match=r"mlflow db upgrade sqlite:///.*old\.db"):
        Store.open(f"sqlite:///{file}")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_store(store, tmp_path):
    for path in (tmp_path / "store" / "mlflow.db", tmp_path / "store"):
        path.chmod(0o500)
        with pytest.raises(StoreError, match=r"read-?only"):
            Store.open(store.uri)
        path.chmod(0o700)


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(mlflow_store, "_PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreError, match="no answer within") as caught:
            Store.open(uri)
    assert "start its server" in str(caught.value)
    assert uri in str(caught.value)


def test_a_deadline_holds_for_any_work():
    never = threading.Event()
    with pytest.raises(StoreError, match="no answer within 0 s"):
        mlflow_store.within(0.05, never.wait, "http://host")
    never.set()
    assert mlflow_store.within(10, lambda: 3, "") == 3
