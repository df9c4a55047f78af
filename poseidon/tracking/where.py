"""Where runs are tracked: a store's address in one form. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from pathlib import Path

from poseidon.errors import UserError

#: Of MLflow's own commands too, so that a plain `mlflow ui` in the same folder shows the same runs.
DEFAULT = "sqlite:///mlflow.db"
#: Artifacts of runs in an SQLite store lie beside it, where MLflow's server puts its own.
ARTIFACTS = "mlartifacts"
_SQLITE = re.compile(r"(?P<scheme>sqlite(?:\+\w+)?:///)(?P<file>[^?]*)(?P<query>\?.*)?")
_WITHOUT_COLON = ("databricks", "databricks-uc", "uc")


def store_uri(uri: str | None = None) -> str:
    """The store's address, an SQLite file's with an absolute path.

    Args:
        uri: the key ``tracking.uri``; without it MLFLOW_TRACKING_URI, else ``mlflow.db`` in the current folder.

    Raises:
        UserError: no store has such an address.
    """
    given = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT
    said = f"{'tracking.uri' if uri else 'MLFLOW_TRACKING_URI'}={given}"
    if given.startswith("sqlite"):
        parts = _SQLITE.fullmatch(given)
        if parts is None or parts["file"] in ("", ":memory:"):
            raise UserError(f"{said}: names no file; an SQLite store is sqlite:///FILE")
        file = Path(parts["file"]).absolute()
        if "?" in str(file):
            raise UserError(f"{said}: {file} has a question mark in its path, which such an address cannot hold")
        return f"{parts['scheme']}{file}{parts['query'] or ''}"
    is_folder = given.startswith("file:") or (":" not in given and given not in _WITHOUT_COLON)
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("1", "true"):
        raise UserError(f"{said}: MLflow keeps no runs in plain folders any more; an SQLite store is sqlite:///FILE")
    return given


def sqlite_file(uri: str) -> Path | None:
    """The file of an SQLite store; None for others."""
    parts = _SQLITE.fullmatch(uri)
    return Path(parts["file"]) if parts else None


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def shown(text: str) -> str:
    """The address, or a text with one in it, without a password."""
    return re.sub(r"(\w://)[^/@\s]*@", r"\1***@", text)
