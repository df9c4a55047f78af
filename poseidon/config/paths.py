"""Where config groups, workflows, benchmarks and templates are: beside the code in a wheel, at a checkout's top."""

from __future__ import annotations

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
