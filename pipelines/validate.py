"""Measure whether an emulated network carries what its config says."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from poseidon.config.app import Result, run
from poseidon.config.check import check_validate
from poseidon.config.schema import ValidateConfig

if TYPE_CHECKING:
    from rich.table import Table

    from poseidon.cluster.validation import Measured


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon validate`` and gives its exit code."""
    return run("validate", argv, _validate, check_validate)


def _validate(config: ValidateConfig, overrides: list[str], folder: Path) -> Result:
    from rich.console import Console

    from poseidon.cluster.validation import measure

    with TemporaryDirectory(prefix="poseidon-") as logs:
        job, measured = measure(config.cluster, config.validate.seconds, Path(logs))
    if not job.ok:
        return Result(job.exit_code)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(measured))
    if all(row.holds for row in measured):
        return Result(0)
    console.print(
        "a link carries less than it should: this machine is too slow or busy for such rates; leave it alone, or raise "
        f"cluster.time_dilation (now {config.cluster.time_dilation:g})"
    )
    return Result(1)


def table(measured: Sequence[Measured]) -> Table:
    """A row per pattern."""
    from rich.table import Table

    from poseidon.cluster.validation import HEADERS, TOLERANCE
    from poseidon.config.units import format_rate

    result = Table(
        title="Emulated network: TCP between its nodes",
        caption=f"per link, mean of those that should be full; a full packet is {1 / HEADERS:.1%} payload, so what is "
        "compared with the rate is goodput and its headers",
    )
    result.add_column("pattern", no_wrap=True)
    for heading in ("rate", "goodput", "share", "lowest", "+headers", f"in {TOLERANCE:.0%}"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in measured:
        rate = row.pattern.rate
        shaped = not math.isinf(rate)
        result.add_row(
            row.pattern.name,
            format_rate(rate) if shaped else "unshaped",
            format_rate(row.goodput),
            f"{row.goodput / rate:.1%}" if shaped else "-",
            f"{row.lowest / rate:.1%}" if shaped else format_rate(row.lowest),
            f"{row.share:.1%}" if shaped else "-",
            ("yes" if row.holds else "NO") if shaped else "-",
        )
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
