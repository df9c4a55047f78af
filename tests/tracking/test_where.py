"""Addresses of stores."""

from __future__ import annotations

import pytest

from poseidon.errors import UserError
from poseidon.tracking.where import shown, sqlite_file, store_uri


def test_a_key_a_variable_or_a_file_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert store_uri() == "http://host:5000"
    assert store_uri("sqlite:///a/b c%d.db?timeout=5") == f"sqlite:///{tmp_path}/a/b c%d.db?timeout=5"
    assert sqlite_file(store_uri("sqlite:///a.db?timeout=5")) == tmp_path / "a.db"
    assert sqlite_file("http://host:5000") is None
    assert store_uri("sqlite:////abs/a.db") == "sqlite:////abs/a.db"
    for other in ("postgresql://user:secret@host/db", "databricks", "sqlite+pysqlite:////x.db"):
        assert store_uri(other) == other


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:mlflow.db", "names no file"),
        ("mlruns", "an SQLite store is sqlite:///FILE"),
        ("file:///somewhere/mlruns", "an SQLite store is sqlite:///FILE"),
    ],
)
def test_what_is_no_store_is_one_line(uri, words, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(UserError, match=f"^tracking.uri={uri}: .*{words}"):
        store_uri(uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match=r"^MLFLOW_TRACKING_URI="):
        store_uri()


def test_a_folder_store_is_taken_from_who_insists(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert store_uri("file:///somewhere/mlruns") == "file:///somewhere/mlruns"


def test_a_question_mark_in_the_path_would_cut_the_address_short(tmp_path, monkeypatch):
    (tmp_path / "what?").mkdir()
    monkeypatch.chdir(tmp_path / "what?")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="question mark"):
        store_uri()


def test_passwords_are_not_shown():
    assert shown("http://me:secret@host:1/x") == "http://***@host:1/x"
    assert shown("tracking.uri=postgresql+psycopg://me:s3@host/db") == "tracking.uri=postgresql+psycopg://***@host/db"
    assert shown("sqlite:////a@b/mlflow.db") == "sqlite:////a@b/mlflow.db"
    assert shown("http://host/a@b") == "http://host/a@b"
