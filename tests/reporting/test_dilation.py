"""Time dilation: the factor of the curves, and how much of a time is this machine's software."""

from __future__ import annotations

import pytest

from poseidon.config.compose import compose
from poseidon.reporting.dilation import apart, chosen, pairs, rows
from poseidon.reporting.figures import speedup
from poseidon.reporting.parts import advice, notes
from poseidon.reporting.sections import Section, sections
from tests.reporting.conftest import as_run
from tests.reporting.fakes import Fake, asleep


def of(*fakes: Fake) -> list[Section]:
    return sections([as_run(one) for one in fakes])


def test_a_and_b_follow_from_two_dilations() -> None:
    a, b = 0.9, 0.4  # seconds
    (section,) = of(*(asleep(nodes=2, dilation=f, seconds=a + b / f) for f in (1, 8, 16)))
    (pair,) = pairs(section)
    assert pair.factor == 8
    assert (pair.dilated, pair.software) == pytest.approx((a, b))
    assert pair.here == pytest.approx(1.3)
    assert pair.difference == pytest.approx(0)
    (row,) = rows([pair])
    assert (row["seconds_at_f"], row["within_bar"]) == (pytest.approx(a + b / 8), True)


@pytest.mark.parametrize(("alone", "within"), [(1.34, True), (1.38, False), (1.26, True), (1.22, False)])
def test_the_bar_of_the_undilated_run(alone: float, within: bool) -> None:
    (section,) = of(*(asleep(dilation=f, seconds=s) for f, s in ((1, alone), (8, 0.95), (16, 0.925))))
    (row,) = rows(pairs(section))
    assert row["within_bar"] is within
    assert row["difference"] == pytest.approx(alone / 1.3 - 1)


def test_an_undilated_run_is_no_test_of_what_it_was_put_into() -> None:
    (section,) = of(*(asleep(dilation=f, seconds=1 + 0.3 / f) for f in (1, 2)))
    (pair,) = pairs(section)
    assert pair.here == pytest.approx(pair.once.median)  # whatever was measured
    assert pair.difference is None
    assert any("nothing here tests A + B" in note for note in notes(section))


def test_repeats_go_in_as_medians() -> None:
    fakes = [asleep(seed=seed, dilation=8, seconds=s) for seed, s in enumerate((1.0, 1.1, 5.0))]
    (section,) = of(*fakes, asleep(dilation=16, seconds=1.05))
    (pair,) = pairs(section)
    assert (pair.once.median, pair.once.count, pair.dilated) == (1.1, 3, pytest.approx(1.0))


def test_without_the_second_dilation_its_command_is_given() -> None:
    (section,) = of(asleep("single", dilation=8), asleep("ps", 4, dilation=8), asleep(nodes=4, dilation=8))
    assert pairs(section) == []
    ((why, command),) = advice(section, "e", None)
    assert "f = 8 and at 16" in why
    words = command.split()
    assert words[:2] == ["poseidon", "train"]
    assert words.count("cluster.time_dilation=16") == 1
    assert {"comm=hybrid", "cluster.nodes=4", "tracking.experiment=e"} <= set(words)
    assert not any("time_dilation=auto" in word for word in words)
    assert compose("train", [w for w in words[2:] if not w.startswith("tracking")]).cluster.time_dilation == 16


def test_without_an_undilated_run_the_smallest_cell_s_command_is_given() -> None:
    (section,) = of(*(asleep(nodes=n, dilation=f, seconds=1.0) for n in (1, 2, 4) for f in (8, 16)))
    ((_, command),) = advice(section, "e", None)
    assert "cluster.nodes=2" in command
    assert "cluster.time_dilation=1 " in command


@pytest.mark.parametrize("factors", [(1,), (1, 8, 16)])
def test_nothing_is_asked_for_that_is_there(factors: tuple[int, ...]) -> None:
    (section,) = of(*(asleep(dilation=f, seconds=1.0) for f in factors))
    assert advice(section, "e", None) == []


def test_noise_is_called_noise() -> None:
    (section,) = of(*(asleep(dilation=f, seconds=s) for f, s in ((8, 1.0), (16, 1.01))))
    assert any("negative" in note for note in notes(section))


def test_runs_without_a_speed_make_no_pair() -> None:
    (section,) = of(asleep(dilation=8, seconds=1.0), asleep(dilation=16, speed=None))
    assert pairs(section) == []


@pytest.mark.parametrize(
    ("cells", "factor"),
    [
        ([("ps", 8.0), ("ps", 8.0), ("ps", 16.0)], 8),
        ([("ps", 8.0), ("ps", 16.0), ("ddp", 16.0)], 16),
        ([("ps", 16.0), ("ps", 8.0)], 8),  # of equals the smaller
        ([("single", 1.0), ("single", 1.0), ("ps", 8.0)], 8),  # one process alone makes no figure
        ([("single", 4.0)], 4),
    ],
)
def test_the_factor_of_a_figure_is_that_of_most_cells(cells: list[tuple[str, float]], factor: float) -> None:
    assert chosen(cells) == factor


def test_repeats_do_not_outvote_cells() -> None:
    many = [asleep(seed=seed, dilation=16) for seed in range(5)]
    (section,) = of(*many, asleep(dilation=8), asleep(nodes=4, dilation=8))
    assert section.dilation == 8


def test_no_figure_mixes_dilations() -> None:
    fakes = [asleep(comm, nodes, dilation=8, speed=100 * nodes) for comm in ("ps", "hybrid") for nodes in (2, 4)]
    fakes += [asleep("single", dilation=f, speed=100) for f in (8, 16)]
    fakes += [asleep("ps", 2, dilation=16, speed=9e9), asleep("ddp", 2, dilation=4, speed=9e9)]
    (section,) = of(*fakes)
    assert {c.dilation for c in section.configurations} == {8.0}
    assert {row["time_dilation"] for row in speedup.rows(section, [])} == {8.0}
    assert [(c.variant, c.dilation) for c in apart(section)] == [("ddp", 4.0)]
    words = " ".join(notes(section))
    assert "runs at f = 8: of the f that most of its cells have, the smallest" in words
    assert "ddp, 2 nodes (f = 4)" in words
    assert "at f = 8" in speedup.draw(section, []).texts[1].get_text()  # type: ignore[union-attr]


def test_a_comparison_under_a_limit_says_so() -> None:
    (section,) = of(*(asleep(dilation=f, seconds=1.0, cpu_bound=f == 1) for f in (1, 8, 16)))
    (pair,) = pairs(section)
    assert pair.bounds == ("CPU at f = 1",)
    assert any("says little" in note for note in notes(section))
    (section,) = of(*(asleep(dilation=f, seconds=1.0, cpu_bound=False) for f in (1, 8, 16)))
    assert not any("says little" in note for note in notes(section))
