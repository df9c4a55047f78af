"""conf/dataset: what each choice says of its rows is what its rows are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from poseidon import data
from poseidon.config import conf_dir
from poseidon.config.build import build
from poseidon.config.compose import compose
from tests.data.folders import make_cifar, make_photos

FILES = sorted((conf_dir() / "dataset").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    GlobalHydra.instance().clear()


def test_rows_are_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar(Path("data/cifar10/cifar-10-batches-bin"), "bin", monkeypatch)
    make_photos(Path("data/imagenet"))
    more = {"imagefolder": ["dataset.num_classes=3"], "glyphs": ["dataset.size=20"]}
    for name in (file.stem for file in FILES):
        node = compose("train", [f"dataset={name}", *more.get(name, [])]).dataset
        assert node["name"] == name
        data.check(node)
        for part in build(node, key="dataset"):
            rows, target = part[len(part) - 1]
            assert list(rows.shape) == node["shape"], name
            assert rows.dtype == getattr(torch, node.get("dtype", "float32")), name
            assert target.dtype == torch.int64
            assert 0 <= target.min() <= target.max() < node["num_classes"]


def test_every_choice_says_what_it_is_and_each_argument_what_it_means() -> None:
    for file in FILES:
        lines = file.read_text().splitlines()
        assert lines[0].startswith("# "), file
        given = [line for line in lines[lines.index(next(x for x in lines if x.startswith("_target_"))) + 1 :] if line]
        plain = [line for line in given if "#" not in line and "${" not in line]
        assert {line.partition(":")[0] for line in plain} <= {"eval_size", "train_share"}, file


def test_noise_follows_the_model_unless_told_otherwise() -> None:
    native = [
        "dataset=synthetic",
        "++model.native.shape=[9]",
        "++model.native.num_classes=7",
        "++model.native.dtype=int64",
    ]
    node = compose("train", native).dataset
    assert (node["image_shape"], node["classes"], node["values"]) == ([9], 7, "int64")
    node = compose(
        "train", [*native, "dataset.shape=[3,8,8]", "dataset.num_classes=4", "dataset.dtype=float32"]
    ).dataset
    assert (node["image_shape"], node["classes"], node["values"]) == ([3, 8, 8], 4, "float32")
