from __future__ import annotations

from poseidon.reporting.curves import MOST_POINTS, joined, panels
from poseidon.reporting.sections import sections
from tests.reporting.conftest import as_run
from tests.reporting.fakes import fake


def test_repeats_are_joined_at_each_iteration():
    runs = [as_run(fake(seed=seed, evaluations=2)) for seed in range(3)]
    points = joined(runs, "eval/accuracy")
    assert [point.iteration for point in points] == [40, 80]
    assert all(point.low < point.median < point.high and point.repeats == 3 for point in points)
    assert points[0].seconds == runs[0].histories["eval/wall_s"][0][1]


def test_repeats_of_different_length_are_joined_as_far_as_they_go():
    points = joined([as_run(fake(points=2)), as_run(fake(points=5))], "train/loss")
    assert [point.repeats for point in points] == [2, 2, 1, 1, 1]


def test_long_curves_are_thinned_and_keep_their_end():
    points = joined([as_run(fake(points=1001))], "train/loss")
    assert MOST_POINTS / 2 < len(points) <= MOST_POINTS
    assert points[-1].iteration == 10010


def test_no_metric_no_curve():
    assert joined([as_run(fake(evaluations=0))], "eval/accuracy") == []


def test_one_process_with_as_many_rows_is_preferred_beside_nodes():
    (section,) = sections(map(as_run, (fake("single"), fake("single", rows=64), fake("ps", 2), fake("ps", 4))))
    names = {nodes: [c.variant for c in found] for nodes, found in panels(section).items()}
    assert names == {2: ["single (64 rows)", "ps"], 4: ["single", "ps"]}
