"""What a suite's file may say, and what is said of a mistake in one."""

from __future__ import annotations

import pytest

from poseidon.bench.suite import Bar, load, names
from poseidon.config.schema import BenchOptions
from poseidon.errors import UserError
from tests.bench.conftest import SUITE


@pytest.mark.parametrize("name", names())
def test_what_is_shipped_can_be_read(name):
    suite = load(BenchOptions(suite=name))
    assert suite.what
    assert all(case.what and case.bars for case in suite.cases)


def test_a_file_of_one_s_own(write):
    suite = load(BenchOptions(suite=write(SUITE)))
    (case,) = suite.cases
    assert (suite.name, suite.what, case.name) == ("mine", "imagined runs", "first")
    assert case.overrides == ["model=mlp", "dataset=digits"]
    assert case.variants == {"ps": ["comm=ps"], "ddp": ["comm=ddp"]}
    assert case.bars[0] == Bar("ps", over="ddp", at_least=1.2, ideal=1.5)
    assert (case.pairs, case.iterations, case.warmup) == (3, 25, 5)


def test_the_command_line_s_counts_go_before_the_case_s_and_these_before_the_suite_s(write):
    text = SUITE.replace("    what: two ways", "    what: two ways\n    pairs: 7\n    iterations: 90")
    path = write(text)
    (case,) = load(BenchOptions(suite=path)).cases
    assert (case.pairs, case.iterations) == (7, 90)
    (case,) = load(BenchOptions(suite=path, pairs=9, iterations=12, warmup=2)).cases
    assert (case.pairs, case.iterations, case.warmup) == (9, 12, 2)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pairs: 3", "pears: 3", "unknown key 'pears'; did you mean pairs"),
        ("    what: two ways", "    whatever: 1", "first: unknown key 'whatever'"),
        ("what: imagined runs\n", "", "what is missing"),
        ("      ps: [comm=ps]", "      ps: comm=ps", "first: ps: must be a list of overrides"),
        ("figure: cpu_per_gb", "figure: cpu_per_bg", "bar 2: there is no figure 'cpu_per_bg'; did you mean cpu_per_gb"),
        ("over: ddp", "over: dpd", "bar 1: over: there is no variant 'dpd'; did you mean ddp"),
        (", over: ddp", "", "bar 1: speed needs the variant that it is over"),
        ("figure: cpu_per_gb", "figure: cpu_per_gb, over: ddp", "bar 2: cpu_per_gb is of one variant, over none"),
        ("at_least: 1.2", "at_least: much", "bar 1: at_least=much: must be a number"),
        ("{variant: ps, over", "{varaint: ps, over", "bar 1: unknown key 'varaint'; did you mean variant"),
        ("pairs: 3", "pairs: 0", "pairs=0: must be a number, at least 1"),
        ("pairs: 3", "iterations: 5", "iterations=5: must be more than the 5 that warm up"),
        ("cases:", "cases: []\nothers:", "unknown key 'others'"),
        ("what: imagined runs", "what: [", "cannot be read"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(write, old, new, words):
    assert old in SUITE
    with pytest.raises(UserError) as error:
        load(BenchOptions(suite=write(SUITE.replace(old, new))))
    assert words in str(error.value)
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "egine"}, "there is no suite 'egine'; did you mean engine; there is engine, guard, overhead,"),
        ({"suite": "nowhere.yaml"}, "there is no file nowhere.yaml"),
        ({"cases": ["engine_3"]}, "suite short has no case 'engine_3'; did you mean engine_2"),
        ({"cases": []}, "name at least one of engine_2"),
        ({"pairs": 0}, "bench.pairs=0: must be at least 1"),
    ],
)
def test_what_there_is_is_said(options, words):
    with pytest.raises(UserError) as error:
        load(BenchOptions(**options))
    assert words in str(error.value)


def test_only_the_cases_that_are_asked_for():
    assert [case.name for case in load(BenchOptions(cases=["lenet"])).chosen] == ["lenet"]
