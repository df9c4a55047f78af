"""Log the folders of runs to MLflow after the fact."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from poseidon.config.paths import run_folders
from poseidon.errors import UserError

USAGE = """\
usage: poseidon log RUN_DIR [RUN_DIR ...] [tracking.uri=URI] [tracking.experiment=NAME]

Logs runs from the files in their folders: of a run whose MLflow server was down, that was trained with
tracking.mlflow=false, or whose folder was copied from another machine. A run that is there already is brought
up to date, not doubled.

  poseidon log outputs/2026-01-31/12-00-00
  poseidon log multirun/2026-01-31/12-00-00-a1b2c3/*
  tracking.uri=http://host:5000     the store (default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here)
  tracking.experiment=NAME          instead of the one that the run was to be in"""

_KEYS = ("tracking.uri", "tracking.experiment")


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon log`` and gives its exit code."""
    if not argv or any(argument in ("--help", "-h") for argument in argv):
        print(USAGE)
        return 0 if argv else 2
    from poseidon.tracking.late import log_folders

    try:
        folders, given = run_folders(argv, _KEYS, "log")
        log_folders(folders, given.get("tracking.uri"), given.get("tracking.experiment"))
    except UserError as error:
        print(f"poseidon log: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
