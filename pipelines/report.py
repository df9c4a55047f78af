"""Make figures, tables and a page from the runs of an experiment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from poseidon.config.app import Result, run
from poseidon.config.schema import ReportConfig


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon report`` and gives its exit code."""
    return run("report", argv, _report, lambda config: None)


def _report(config: ReportConfig, overrides: list[str], folder: Path) -> Result:
    from rich.console import Console

    from poseidon.reporting import make_report

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its fonts, and Hydra would show it
    console = Console(highlight=False)
    index = make_report(config, console)
    console.print(f"report: {index}", markup=False, soft_wrap=True)
    return Result(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
