"""Files and tables of a bench, and its command line."""

from __future__ import annotations

import csv

import pytest

from poseidon import cli
from poseidon.bench.results import verdict
from poseidon.bench.statistics import Estimate
from poseidon.bench.suite import Bar
from tests.bench.conftest import SUITE


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("bar", "found", "word"),
    [
        (Bar("a", at_least=1.2), Estimate(1.2, 1.1, 1.3, 5), "reached"),
        (Bar("a", at_least=1.2), Estimate(1.19, 1.1, 1.3, 5), "open"),
        (Bar("a", at_least=1.2), Estimate(1.1, 1.05, 1.15, 5), "missed"),
        (Bar("a", at_least=1.2), Estimate(1.19, 1.19, 1.19, 1), "missed"),
        (Bar("a", at_most=1.1), Estimate(1.05, 1.0, 1.2, 5), "reached"),
        (Bar("a", at_most=1.1), Estimate(1.15, 1.05, 1.2, 5), "open"),
        (Bar("a", at_most=1.1), None, "not measured"),
        (Bar("a"), Estimate(1.0, 1.0, 1.0, 5), ""),
    ],
)
def test_a_bar_is_reached_by_the_median_and_open_within_the_interval(bar, found, word):
    assert verdict(bar, found) == word


def test_the_command_writes_page_tables_and_records(here, write, imagined, capfd):
    assert cli.main(["bench", f"bench.suite={write(SUITE)}"]) == 0
    out, err = capfd.readouterr()
    folder = here / "reports" / "bench" / "mine"
    assert out.splitlines()[-1] == "bench: reports/bench/mine/table.md"
    assert "reached, ahead" in out
    assert err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["bars.csv", "raw.jsonl", "table.md", "variants.csv"]
    page = (folder / "table.md").read_text()
    for words in (
        "# mine: imagined runs",
        "`poseidon bench bench.suite=",
        "| first | ps | x ddp | 1.500 | 1.500 to 1.500 | 3 | \N{GREATER-THAN OR EQUAL TO} 1.2 | 1.5 | reached, ahead |",
        "* date: 2026-12-03; 6 runs",
        "* commit: 0123456789ab",
        "* torch: 2.14.1",
        "* first: two ways",
    ):
        assert words in page
    assert "Not measured" not in page
    bars = list(csv.DictReader((folder / "bars.csv").open()))
    assert [(row["figure"], row["median"], row["verdict"]) for row in bars] == [
        ("speed", "1.5", "reached"),
        ("cpu_per_gb", "2", "missed"),
    ]
    variants = list(csv.DictReader((folder / "variants.csv").open()))
    assert [row["variant"] for row in variants] == ["ps", "ddp"]
    assert variants[0]["command"].startswith("poseidon train ")


def test_a_failed_run_is_in_the_table_and_in_the_exit_code(here, write, imagined):
    imagined.seconds["ddp"] = "rank 1 is gone"
    assert cli.main(["bench", f"bench.suite={write(SUITE)}", "bench.folder=out"]) == 1
    page = (here / "out" / "table.md").read_text()
    assert "## Not measured" in page
    assert "ddp, round 1/3: failed: rank 1 is gone" in page


@pytest.mark.parametrize(("came", "code"), [(KeyboardInterrupt(), 130), (143, 143)])
def test_an_interrupted_bench_writes_what_is_there(here, write, imagined, capfd, came, code):
    imagined.seconds["ddp"] = came
    assert cli.main(["bench", f"bench.suite={write(SUITE)}", "bench.folder=out"]) == code
    assert "goes on where this was" in capfd.readouterr().out
    assert "| first | ps |" in (here / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench.suite=egine"], "there is no suite 'egine'"),
        (["bench.cases=[engine_3]"], "has no case 'engine_3'"),
        (["bench.pears=3"], "bench.pears: there is no such key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(here, imagined, capfd, arguments, words):
    assert cli.main(["bench", *arguments]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert list(here.iterdir()) == []
    assert imagined.asked == []


def test_help_tells_suites_and_keys(capsys):
    assert cli.main(["bench", "--help"]) == 0
    printed = capsys.readouterr().out
    for words in ("bench.suite=engine", "bench.suite=my.yaml", "fresh: false", "raw.jsonl"):
        assert words in printed
