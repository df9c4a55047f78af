"""The order of runs, and what is not run again."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from poseidon.bench import plan as plans
from poseidon.bench.results import bar_rows, variant_rows
from poseidon.bench.runner import Bench, Interrupted
from poseidon.bench.suite import load
from poseidon.config.schema import BenchOptions
from poseidon.errors import UserError
from tests.bench.conftest import SUITE


@pytest.fixture
def bench(write, tmp_path):
    """Makes a bench of a suite's text, always in the same folder."""

    def make(text: str = SUITE, *, fresh: bool = False, **options) -> Bench:
        out = io.StringIO()
        made = Bench(load(BenchOptions(suite=write(text), **options)), tmp_path / "out", Console(file=out), fresh=fresh)
        made.shown = out
        return made

    return make


def run(bench) -> Bench:
    for _ in bench.run():
        pass
    return bench


def test_rounds_go_forth_and_back(bench, imagined):
    run(bench())
    assert imagined.asked == ["ps", "ddp", "ddp", "ps", "ps", "ddp"]


def test_ratios_bars_and_verdicts(bench, imagined):
    (result,) = run(bench()).results
    speed, cpu = bar_rows(result)
    assert (speed["median"], speed["pairs"], speed["verdict"], speed["lead"]) == (1.5, 3, "reached", "ahead")
    assert (cpu["median"], cpu["verdict"], cpu["lead"]) == (2.0, "missed", None)
    ps, ddp = variant_rows(result)
    assert (ps["iteration_seconds"], ps["longest_seconds"], ps["bytes_sent"], ps["runs"]) == (1.0, 2.0, 2.5e8, 3)
    assert ps["gbit_per_second"] == pytest.approx(2.0)
    assert (ddp["iteration_seconds"], ddp["busiest_thread_seconds"]) == (1.5, 0.2)


def test_every_run_is_a_line_with_its_command_date_versions_and_host(bench, imagined, tmp_path):
    run(bench())
    lines = [json.loads(line) for line in (tmp_path / "out" / "raw.jsonl").read_text().splitlines()]
    assert [line["variants"] for line in lines] == [[name] for name in imagined.asked]
    assert [line["round"] for line in lines] == [1, 1, 2, 2, 3, 3]
    first = lines[0]
    assert first["command"].startswith("poseidon train ")
    assert {"started", "host", "versions", "git_commit"} <= first["summary"].keys()
    assert "schemes" not in first["summary"]


def test_what_has_been_measured_is_not_measured_again(bench, imagined):
    run(bench(pairs=1))
    run(bench(pairs=3))
    assert imagined.asked == ["ps", "ddp", "ddp", "ps", "ps", "ddp"]
    (result,) = run(bench()).results
    assert len(imagined.asked) == 6
    assert bar_rows(result)[0]["pairs"] == 3
    run(bench(fresh=True))
    assert len(imagined.asked) == 12
    assert len(run(bench()).records) == 6


def test_another_config_is_measured_anew(bench, imagined):
    run(bench(pairs=1))
    (result,) = run(bench(pairs=1, iterations=40)).results
    assert len(imagined.asked) == 4
    assert bar_rows(result)[0]["pairs"] == 1


def test_a_line_that_was_cut_off_is_left_out_and_a_strange_file_refused(bench, imagined, tmp_path):
    run(bench())
    raw = tmp_path / "out" / "raw.jsonl"
    raw.write_text(raw.read_text()[:-40])
    (result,) = run(bench()).results
    assert len(imagined.asked) == 7
    assert bar_rows(result)[0]["pairs"] == 3
    run(bench())
    assert len(imagined.asked) == 7
    raw.write_text("{}\n{}\n")
    with pytest.raises(UserError, match=r"raw.jsonl:1: is no record"):
        bench()


BEST = SUITE.replace(
    "ddp: [comm=ddp]", 'ddp: [comm=ddp]\n      best: [comm=ddp, "comm.ddp.bucket_cap_mb=1,5,25"]'
).replace("over: ddp", "over: best")


def test_the_fastest_alternative_stands_for_its_variant(bench, imagined):
    imagined.seconds |= {"ddp 1": 1.4, "ddp 5": 1.3, "ddp 25": 1.5}
    (result,) = run(bench(BEST, pairs=1)).results
    assert imagined.asked == ["ddp 1", "ddp 5", "ddp 25", "ps", "ddp 25", "ddp 5"]
    row = bar_rows(result)[0]
    assert (row["median"], row["over"]) == (1.3, "best (bucket_cap_mb=5)")
    assert bar_rows(bench(BEST, pairs=1).results[0])[0] == row
    run(bench(BEST, pairs=1))
    assert len(imagined.asked) == 6


def test_an_alternative_that_is_another_variant_runs_once_for_both(bench, imagined):
    imagined.seconds |= {"ddp 1": 1.4, "ddp 5": 1.3, "ddp 25": 1.2}
    (result,) = run(bench(BEST, pairs=2)).results
    assert imagined.asked[3:] == ["ps", "ddp 25", "ddp 25", "ps"]
    assert bar_rows(result)[0]["median"] == pytest.approx(1.2)


def test_a_failed_run_is_named_kept_and_not_tried_again_at_once(bench, imagined, tmp_path):
    imagined.seconds["ddp"] = "rank 1 is gone"
    made = run(bench())
    assert imagined.asked == ["ps", "ddp", "ps", "ps"]
    (result,) = made.results
    (note,) = result.notes
    assert "ddp, round 1/3: failed: rank 1 is gone" in note
    assert "poseidon train" in note
    assert bar_rows(result)[0]["verdict"] == "not measured"
    assert (tmp_path / "out" / "failed" / "first-ddp" / "summary.json").is_file()
    assert made.failures == 1
    imagined.seconds["ddp"] = 2.0
    made = run(bench())
    assert imagined.asked[4:] == ["ddp", "ddp", "ddp"]
    assert bar_rows(made.results[0])[0]["median"] == 2.0
    assert made.failures == 0


def test_a_signal_ends_all_and_what_was_measured_stays(bench, imagined):
    imagined.seconds["ddp"] = 130
    made = bench()
    with pytest.raises(Interrupted) as signal:
        run(made)
    assert signal.value.exit_code == 130
    assert [record.variants for record in made.records] == [["ps"]]
    imagined.seconds["ddp"] = 1.5
    run(bench())
    assert imagined.asked == ["ps", "ddp", "ddp", "ddp", "ps", "ps", "ddp"]


def test_tables_have_the_cases_that_are_not_run_now(bench, imagined):
    text = (
        SUITE
        + "  second:\n    what: another\n    variants: {ps: [comm=ps]}\n    bars: [{variant: ps, figure: worst}]\n"
    )
    run(bench(text, cases=["first"]))
    made = bench(text, cases=["second"])
    first, second = made.results
    assert (bar_rows(first)[0]["pairs"], second.rounds) == (3, {})
    run(made)
    first, second = made.results
    assert (bar_rows(first)[0]["pairs"], bar_rows(second)[0]["median"]) == (3, 2.0)


EMULATED = SUITE + "  second:\n    what: emulated\n    overrides: [cluster=emulated]\n    variants: {ps: [comm=ps]}\n"


def test_where_nothing_can_be_emulated_such_cases_are_left_out(bench, imagined, monkeypatch):
    def lacks():
        raise UserError("cluster=emulated: needs tc")

    monkeypatch.setattr(plans, "find_host", lacks)
    made = run(bench(EMULATED))
    assert len(imagined.asked) == 6
    assert "second: left out: cluster=emulated: needs tc" in made.shown.getvalue()
    with pytest.raises(UserError, match="suite mine: cluster=emulated: needs tc"):
        bench(EMULATED, cases=["second"])
