from __future__ import annotations

import pytest

from poseidon.errors import UserError
from poseidon.reporting.published import load


def test_speedups_follow_from_the_published_seconds():
    curves = {curve.system: dict(curve.points) for curve in load().of("vgg19_22k", 32, 21841) if len(curve.points) > 1}
    rounded = {system: [round(speedup, 2) for speedup in points.values()] for system, points in curves.items()}
    assert rounded == {
        "Poseidon on Caffe": [0.99, 1.96, 3.83, 7.63, 15.03, 29.45],
        "Caffe+WFBP": [0.95, 1.78, 3.28, 6.12, 11.56, 21.37],
        "Caffe+PS": [0.54, 1.01, 1.47, 2.16, 2.82, 4.42],
    }


@pytest.mark.parametrize(
    ("experiment", "points"),
    [
        (("alexnet", 256, 1000), {"Poseidon": {8: 4.5}}),
        (("googlenet", 128, 1000), {"Poseidon": {8: 4.0}}),
        (("cifar10_quick", 100, 10), {"Poseidon": {8: 4.0}}),
        (("inception_v3", 32, 1000), {"Poseidon": {32: 31.5}, "distributed TensorFlow": {32: 20.0}}),
    ],
)
def test_single_points(experiment, points):
    assert {curve.system: dict(curve.points) for curve in load().of(*experiment)} == points


@pytest.mark.parametrize("experiment", [("alexnet", 32, 1000), ("alexnet", 256, 22), ("alexnet", 256, None)])
def test_other_settings_are_not_theirs(experiment):
    assert load().of(*experiment) == []


def test_what_was_not_checked_says_so():
    for curve in load().curves:
        assert curve.label.endswith(": unverified" if curve.trust == "U" else ": published")
        assert curve.paper in load().papers
    assert {curve.word for curve in load().of("vgg19", 32, 1000)} == {"unverified"}


@pytest.mark.parametrize(
    "entry",
    [
        "{paper: P15}",
        "{paper: P15, system: a, models: [b], batch_size: 1, classes: 1, hardware: c, link: d, trust: X, points: {}}",
    ],
)
def test_a_bad_entry_is_named(tmp_path, entry):
    (tmp_path / "p.yaml").write_text(f"curves:\n  - {entry}\n")
    with pytest.raises(UserError, match="curve 0"):
        load(tmp_path / "p.yaml")
