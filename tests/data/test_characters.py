"""Text as rows of characters: what a row is, that training and evaluation share nothing, and sources that fail."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from poseidon import data
from poseidon.errors import UserError

NODE = {"_target_": "poseidon.data.text", "row_shape": [64], "num_classes": 128}


def string(codes: torch.Tensor) -> str:
    return bytes(codes.flatten().tolist()).decode("ascii")


@pytest.mark.parametrize("source", ["python", "generated"])
def test_a_row_is_characters_and_the_ones_that_follow(source: str) -> None:
    train, evaluation = data.text([64], source, characters=50_000)
    assert abs(len(train) / (len(train) + len(evaluation)) - 0.9) < 0.01
    (codes, following), (after, _) = train[3], train[4]
    assert (codes.shape, codes.dtype, following.dtype) == ((64,), torch.int64, torch.int64)
    assert torch.equal(codes[1:], following[:-1])
    assert following[-1] == after[0]
    rows = train.__getitems__(range(len(train))).tensors
    assert string(rows[0]) == string(train.codes)[: len(train) * 64]  # whole, in its order, none twice
    assert all(tensor.is_contiguous() and tensor.max() < 128 for tensor in rows)
    with pytest.raises(IndexError):
        train[len(train)]
    assert len(train.__getitems__([])) == 0


def test_training_and_evaluation_are_parts_of_one_text_without_overlap(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("".join(f"{number:04} " for number in range(1000)))
    train, evaluation = data.text([10], file=str(file), train_share=0.5)
    assert [len(train), len(evaluation)] == [249, 249]
    assert string(train.codes) + string(evaluation.codes) == file.read_text()
    seen = [string(part.__getitems__(range(len(part))).tensors[0]).split() for part in (train, evaluation)]
    assert not {*seen[0]} & {*seen[1]}


def test_the_documentation_reads_as_text() -> None:
    train, evaluation = data.text([64])
    whole = string(train.codes) + string(evaluation.codes)
    assert len(whole) > 300_000
    assert "  " not in whole
    assert "\n\n" not in whole
    assert "assert" in whole[:200]  # the first of the sorted topics
    assert string(data.text([64], characters=5000)[0].codes) == whole[:4500]


def test_generated_text_follows_its_seed_and_can_be_learnt() -> None:
    texts = [string(data.text([64], "generated", characters=100_000, seed=seed)[0].codes) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    words = texts[0].split()
    following: dict[str, set[str]] = {}
    for word, after in pairwise(words):
        following.setdefault(word, set()).add(after.rstrip("."))
    assert max(len(after) for word, after in following.items() if not word.endswith(".")) <= 8
    assert len({word.rstrip(".") for word in words}) > 100
    counts = torch.tensor([texts[0].count(letter) for letter in sorted({*texts[0]})]) / len(texts[0])
    assert -(counts * counts.log()).sum() < 0.7 * math.log(128)
    assert sum(map(len, (part.codes for part in data.text([8], "generated", characters=777)))) == 777


def test_what_is_not_ascii_is_a_question_mark(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("naïve 日本\r\n".encode() * 20 + b"\xff\xfe" * 10)
    train, evaluation = data.text([5], file=str(file))
    assert string(train.codes).startswith("na?ve ??\nna?ve")
    assert string(evaluation.codes).endswith("????")


def test_a_missing_file_or_module_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=r"file=.*: there is no such file; set dataset.file"):
            data.check({**NODE, "file": str(place)})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"dataset.source=generated"):
        data.text([64])


@pytest.mark.parametrize(("content", "share"), [("", 0.9), ("a" * 64, 0.9), ("a" * 700, 0.99), ("a" * 700, 0.01)])
def test_a_text_too_short_for_both_parts(content: str, share: float, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(content)
    with pytest.raises(UserError, match=rf"file=.*: {len(content)} characters with train_share={share} are too few"):
        data.text([64], file=str(tmp_path / "text"), train_share=share)
    assert len(data.text([1], file=str(Path(__file__)))[0]) > 1000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row_shape": [3, 4]}, r"dataset.shape=\[positions\]"),
        ({"row_shape": [0]}, "row_shape: a side=0"),
        ({"row_shape": None}, "row_shape=None"),
        ({"num_classes": 64}, "set dataset.num_classes=128"),
        ({"source": "nix"}, "source=nix must be python or generated; a text of your own is dataset.file=PATH"),
        ({"characters": 0}, "characters=0"),
        ({"train_share": 1}, "train_share=1"),
        ({"seed": -1}, "seed=-1"),
        ({"file": 3}, "file=3: must be a path"),
    ],
)
def test_arguments_that_cannot_be(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        data.check({**NODE, **changes})
