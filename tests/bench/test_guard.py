"""Nothing gets slower unnoticed: ratios of the suite ``guard`` against its bars."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from poseidon.bench.results import bar_rows
from poseidon.bench.runner import Bench
from poseidon.bench.suite import load
from poseidon.config.schema import BenchOptions
from poseidon.errors import UserError

#: Pairs after which a bar that is not reached is believed to be missed.
MORE = 7


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [case.name for case in load(BenchOptions(suite="guard")).cases])
def test_no_ratio_falls_below_its_bar(tmp_path, case):
    shown = io.StringIO()
    for pairs in (None, MORE):
        options = BenchOptions(suite="guard", cases=[case], pairs=pairs)
        try:
            bench = Bench(load(options), tmp_path, Console(file=shown))
        except UserError as error:
            pytest.skip(str(error))
        for _ in bench.run():
            pass
        rows = [row for result in bench.results for row in bar_rows(result) if row["case"] == case]
        below = [row for row in rows if row["verdict"] != "reached"]
        if not below:
            return
    pytest.fail(f"{below}\n{shown.getvalue()}", pytrace=False)
