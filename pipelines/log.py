"""Log the folders of runs to MLflow after the fact."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

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
        folders, given = _parse(argv)
        log_folders(folders, given.get("tracking.uri"), given.get("tracking.experiment"))
    except UserError as error:
        print(f"poseidon log: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    return 0


def _parse(argv: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    folders, given = [], {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and key in _KEYS:
            given[key] = value
        elif Path(argument).is_dir():
            folders.append(Path(argument))
        else:
            raise UserError(f"{argument}: is no folder of a run; keys are {' and '.join(_KEYS)}")
    if not folders:
        raise UserError("name the folders of runs; see poseidon log --help")
    return folders, given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
