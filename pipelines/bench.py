"""Compare ways of communicating side by side, and with what has to be reached."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from poseidon.config.app import Result, run
from poseidon.config.schema import BenchConfig


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon bench`` and gives its exit code."""
    return run("bench", argv, _bench, _check)


def _check(config: BenchConfig) -> None:
    from poseidon.bench.suite import load

    load(config.bench)


def _bench(config: BenchConfig, overrides: list[str], folder: Path) -> Result:
    from rich.console import Console

    from poseidon.bench import table
    from poseidon.bench.runner import Bench, Interrupted
    from poseidon.bench.suite import load

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else table.WIDE)
    options, suite = config.bench, load(config.bench)
    where = Path(options.folder).expanduser() if options.folder else Path("reports", "bench", suite.name)
    bench, code = Bench(suite, where, console, fresh=options.fresh), 0
    command = shlex.join(["poseidon", "bench", *overrides])
    try:
        for _ in bench.run():
            table.write(suite, bench.results, bench.records, command, where)
    except KeyboardInterrupt:
        code = 130
    except Interrupted as signal:
        code = signal.exit_code
    if code:
        console.print("interrupted; the same command goes on where this was")
    page = table.write(suite, bench.results, bench.records, command, where)
    for heading, rows, caption in table.tables(bench.results):
        console.print(table.render(heading, rows, caption, console.width))
    console.print(f"bench: {page}", markup=False, soft_wrap=True)
    return Result(code or (1 if bench.failures else 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
