"""Median, interval, and what is called a lead."""

from __future__ import annotations

import math
import random

import pytest

from poseidon.bench.statistics import Estimate, estimate


def test_the_interval_is_student_s_of_the_logarithms():
    values = [math.exp(x) for x in (0.1, 0.2, 0.3, 0.4, 0.5)]
    found = estimate(values)
    half = 2.776 * math.sqrt(0.025) / math.sqrt(5)
    assert found.median == pytest.approx(math.exp(0.3))
    assert (found.low, found.high) == (pytest.approx(math.exp(0.3 - half)), pytest.approx(math.exp(0.3 + half)))
    assert found.count == 5


def test_a_ratio_and_its_inverse_tell_the_same():
    values = [1.1, 1.3, 1.25, 1.05, 1.17]
    found, inverse = estimate(values), estimate([1 / value for value in values])
    assert found.median == pytest.approx(1 / inverse.median)
    assert found.low == pytest.approx(1 / inverse.high)


def test_the_interval_holds_the_true_ratio_in_95_of_100_cases():
    drawn = random.Random(0)
    held = 0
    for _ in range(2000):
        found = estimate([1.2 * math.exp(drawn.gauss(0, 0.05)) for _ in range(5)])
        held += found.low <= 1.2 <= found.high
    assert 0.94 <= held / 2000 <= 0.96


def test_few_values():
    assert estimate([]) is None
    assert estimate([2.0]) == Estimate(2.0, 2.0, 2.0, 1)
    assert estimate([1.0, 0.0, 1.0]) == Estimate(1.0, 0.0, 1.0, 3)
    assert estimate([1.5, 1.5, 1.5]).low == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("median", "word"), [(1.05, "ahead"), (1.049, "equal"), (1.0, "equal"), (0.953, "equal"), (0.95, "behind")]
)
def test_a_lead_under_5_percent_is_equal(median, word):
    assert Estimate(median, median, median, 5).lead == word


def test_a_lead_that_the_interval_does_not_confirm_is_none():
    assert Estimate(1.3, 1.01, 1.6, 5).lead == "ahead"
    assert Estimate(1.3, 0.99, 1.6, 5).lead == "equal"
    assert Estimate(0.8, 0.6, 1.01, 5).lead == "equal"
    assert Estimate(0.8, 0.6, 0.99, 5).lead == "behind"
