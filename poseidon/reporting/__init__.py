"""From tracked runs to figures and pages. Importing it imports neither matplotlib nor mlflow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from poseidon.config.schema import ReportConfig


def make_report(config: ReportConfig, console: Console | None = None) -> Path:
    """See :func:`poseidon.reporting.report.make_report`."""
    from poseidon.reporting.report import make_report as make

    return make(config, console)


def run_figures(run_dir: Path) -> list[Path]:
    """See :func:`poseidon.reporting.run.run_figures`."""
    from poseidon.reporting.run import run_figures as draw

    return draw(run_dir)
