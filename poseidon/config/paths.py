"""Where config groups, workflows, benchmarks and templates are: beside the code in a wheel, at a checkout's top; and
the folders that a user names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from poseidon.errors import UserError


def conf_dir() -> Path:
    """Absolute path of ``conf/``. Raises UserError if the installation lacks it."""
    return _shipped("conf")


def pipelines_dir() -> Path:
    """Absolute path of ``pipelines/``. Raises UserError if the installation lacks it."""
    return _shipped("pipelines")


def reports_dir() -> Path:
    """Absolute path of ``reports/``: templates, style and published figures. UserError if the installation lacks it."""
    return _shipped("reports")


def benchmarks_dir() -> Path:
    """Absolute path of ``benchmarks/``: suites of ``poseidon bench``. Raises UserError if the installation lacks it."""
    return _shipped("benchmarks")


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent.parent
    for parent in (package, package.parent):
        if (parent / name).is_dir():
            return parent / name
    raise UserError(f"this installation of poseidon has no folder {name}/, looked in {package} and beside it")


def run_folders(argv: Sequence[str], keys: Collection[str], workflow: str) -> tuple[list[Path], dict[str, str]]:
    """A workflow's arguments: folders of runs, and key=value.

    Raises:
        UserError: an argument is neither; no folder is named.
    """
    folders, given = [], {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and key in keys:
            given[key] = value
        elif Path(argument).is_dir():
            folders.append(Path(argument))
        else:
            raise UserError(f"{argument}: is no folder of a run; keys are {' and '.join(keys)}")
    if not folders:
        raise UserError(f"name the folders of runs; see poseidon {workflow} --help")
    return folders, given
