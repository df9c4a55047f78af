"""``poseidon log``: run folders into MLflow after the fact, e.g. of a run whose server was down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from poseidon.errors import UserError
from poseidon.tracking.mlflow_store import Store, StoreError, explain
from poseidon.tracking.upload import Upload, read_summary
from poseidon.tracking.where import shown, store_uri


def log_folders(
    folders: Sequence[Path], uri: str | None, experiment: str | None, say: Callable[[str], None] = print
) -> None:
    """Logs each folder's run; one that the store has already is brought up to date, not doubled.

    Args:
        uri: of the store; default as for training.
        experiment: default: the one that the run was to be in.

    Raises:
        UserError: a folder is no run's (then none is logged), or the store cannot be used.
    """
    summaries = [read_summary(folder) for folder in folders]
    address = store_uri(uri)
    store = Store.open(address)
    for folder, summary in zip(folders, summaries, strict=True):
        name = experiment or str(summary.get("experiment") or f"{summary.get('model')}-{summary.get('dataset')}")
        try:
            upload = Upload(store, store.experiment(name), folder)
            found = upload.find()
            upload.parent = _parent(store, summary, upload.experiment_id)
            upload.all()
        except UserError:
            raise
        except Exception as error:  # MLflow's, its database's or the network's
            raise StoreError(address, explain(error, address)) from error
        done = "brought up to date" if found else "logged"
        end = "" if summary["status"] != "running" else "; its records say that it is still running"
        say(f"{folder}: {done}: experiment {name}, run {upload.name} in {shown(address)}{end}")


def _parent(store: Store, summary: dict[str, object], experiment_id: str) -> str | None:
    """The sweep's run, if the run belongs to one and this store and experiment have it."""
    reference = summary.get("mlflow")
    parent = reference.get("parent_id") if isinstance(reference, dict) else None
    if not parent:
        return None
    try:
        run = store.client.get_run(parent)
    except Exception:  # it is another store's
        return None
    return str(parent) if run.info.experiment_id == experiment_id else None
