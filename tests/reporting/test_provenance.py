"""What a reader is told before believing a comparison."""

from __future__ import annotations

import pytest

from poseidon.reporting.provenance import config_differences, facts, warnings
from poseidon.reporting.sections import sections
from tests.reporting.conftest import OTHER, as_run
from tests.reporting.fakes import fake


def told(*fakes):
    return " ".join(warnings(sections([as_run(one) for one in fakes])))


def test_runs_that_are_alike_need_no_warning():
    assert told(fake("single"), fake("ps"), fake("ps", seed=1, speed=1100.0)) == ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (fake(seed=1, speed=400.0), "differ in speed by up to 2.5 x"),
        (fake(git_commit="f" * 40), "several commits"),
        (fake(git_dirty=True), "edits that are in no commit"),
        (fake(versions={"python": "3.12.1"}), "different versions"),
        (fake(host=OTHER), "different hosts"),
        (fake(oversubscribed=True), "more ranks x threads than cores"),
        (fake("downpour"), "replicas differ by nature while they train"),
    ],
)
def test_what_spoils_a_comparison_is_said(other, words):
    assert words in told(fake(), other)


def test_facts_name_every_value_with_the_number_of_runs():
    runs = [as_run(one) for one in (fake(), fake(seed=1), fake(seed=10, host=OTHER, git_dirty=True))]
    found = dict(facts(runs))
    assert found["CPU"] == "AMD EPYC (2); Intel Xeon (1)"
    assert found["commit"] == "0123456789ab (2); 0123456789ab (edited) (1)"
    assert found["seeds"] == "0, 1, 10"
    assert found["torch"] == "2.14.1"


def test_differing_keys_are_listed_with_their_values():
    runs = [as_run(fake(seed=seed, params={"optimizer.lr": lr})) for seed, lr in ((0, "0.1"), (1, "0.02"), (2, "0.1"))]
    assert config_differences(runs) == [("optimizer.lr", "0.02 (1); 0.1 (2)"), ("seed", "0 (1); 1 (1); 2 (1)")]


def test_records_without_facts_are_not_known():
    found = dict(facts([as_run(fake(host=None, versions=None, git_commit=None))]))
    assert found["commit"] == "not known"
