"""Whole epochs of every data set through the trainer's loader: a disjoint cover over the ranks, another order each
time, and the same batches in a rerun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from poseidon import data
from poseidon.data import drawn
from poseidon.data.sampler import GlobalBatchSampler
from poseidon.training.loader import EpochLoader
from poseidon.training.seeding import seed_epoch
from tests.data.folders import make_cifar, make_photos

Make = Callable[[], Any]
NAMES = ["mnist5k", "digits", "synthetic", "synthetic text", "glyphs", "glyphs drawn", "cifar10", "imagefolder", "text"]


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Gives the training rows of the data set named; 12 to 61 rows that all differ, but for the real digits."""
    name = request.param
    if name == "glyphs drawn":
        monkeypatch.setattr(drawn, "_MOST_KEPT", 0)
    if name.startswith("cifar10"):
        make_cifar(tmp_path / "cifar-10-batches-bin", "bin", monkeypatch)
    if name == "imagefolder":
        make_photos(tmp_path)
    return {
        "mnist5k": lambda: data.mnist5k(train_share=0.01)[0],
        "digits": lambda: data.digits(train_share=0.03)[0],
        "synthetic": lambda: data.synthetic([2, 3], 4, size=37)[0],
        "synthetic text": lambda: data.synthetic([5], 40, size=37, values="int64")[0],
        "glyphs": lambda: data.glyphs([1, 12, 12], 5, size=41, eval_size=1)[0],
        "glyphs drawn": lambda: data.glyphs([3, 12, 12], 5, size=41, eval_size=1)[0],
        "cifar10": lambda: data.cifar10(str(tmp_path), augment=False)[0],
        "cifar10 augmented": lambda: data.cifar10(str(tmp_path))[0],
        # Images of one colour: the same wherever they are cut.
        "imagefolder": lambda: data.imagefolder(str(tmp_path), [3, 8, 8], 3)[0],
        "text": lambda: data.text([16], "generated", characters=1000)[0],
    }[name]


class Rank:
    """One rank's loader, used as the trainer uses it."""

    def __init__(self, rows: Any, rank: int, ranks: int, *, batch: int = 4, seed: int = 3, workers: int = 0) -> None:
        self.rank, self.seed = rank, seed
        sampler = GlobalBatchSampler(len(rows), batch, rank=rank, world_size=ranks, seed=seed)
        self.loader = EpochLoader(rows, sampler, device=torch.device("cpu"), micro_batches=2, workers=workers)

    def epoch(self, number: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Each step's rows, as bytes of input and target."""
        seed_epoch(self.seed, self.rank, number, 0)
        for step in self.loader.epoch(number):
            pairs = [pair for batch in step for pair in zip(*batch.data, strict=True)]
            assert len(pairs) == sum(batch.rows for batch in step)
            yield [(x.numpy().tobytes(), y.numpy().tobytes()) for x, y in pairs]


def cover(rows: Any, ranks: int, number: int, **options: Any) -> list[list[list[tuple[bytes, bytes]]]]:
    """[rank][step] of one epoch."""
    return [list(Rank(rows, rank, ranks, **options).epoch(number)) for rank in range(ranks)]


def flat(epoch: list[list[list[tuple[bytes, bytes]]]]) -> list[tuple[bytes, bytes]]:
    """The epoch's rows in the order of one process: step by step, rank by rank."""
    return [row for step in zip(*epoch, strict=True) for part in step for row in part]


@pytest.mark.parametrize("make", NAMES, indirect=True)
def test_every_row_once_per_epoch_over_all_ranks_in_another_order_each_time(make: Make) -> None:
    rows = make()
    whole = Counter(tuple(x.numpy().tobytes() for x in rows[i]) for i in range(len(rows)))
    orders = []
    for ranks in (1, 2, 3):
        for number in (0, 1):
            epoch = cover(rows, ranks, number)
            assert len({len(steps) for steps in epoch}) == 1
            assert Counter(flat(epoch)) == whole
            orders.append(flat(epoch))
    assert orders[0] != orders[1]
    assert orders[2] != orders[3]
    assert flat(cover(rows, 1, 0, batch=8)) == orders[2]  # one process with the global batch of two
    assert flat(cover(make(), 2, 1)) == orders[3]  # a rerun
    assert flat(cover(rows, 1, 0, seed=4)) != orders[0]


@pytest.mark.parametrize("make", ["cifar10", "imagefolder", "glyphs drawn", "text"], indirect=True)
@pytest.mark.parametrize("batch", [1, 5, 100])
def test_uneven_last_batches_and_ranks_without_rows(make: Make, batch: int) -> None:
    rows = make()
    epoch = cover(rows, 3, 0, batch=batch)
    assert {len(steps) for steps in epoch} == {-(-len(rows) // (3 * batch))}
    assert Counter(flat(epoch)) == Counter(flat(cover(rows, 1, 1)))


@pytest.mark.parametrize("make", ["cifar10 augmented", "glyphs drawn", "imagefolder", "text"], indirect=True)
def test_loading_processes_give_the_same_cover_epoch_after_epoch_and_in_a_rerun(make: Make) -> None:
    runs = []
    for _ in range(2):
        rank = Rank(make(), 0, 1, workers=2)
        rank.loader.fork(0)
        runs.append([[row for step in rank.epoch(number) for row in step] for number in (0, 1)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    labels = [Counter(target for _, target in epoch) for epoch in runs[0]]
    assert labels[0] == labels[1]
    assert labels[0].total() == len(make())


@pytest.mark.parametrize("make", ["cifar10 augmented"], indirect=True)
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentations_differ_by_rank_and_epoch_and_are_those_of_the_seed(make: Make, workers: int) -> None:
    """The same rows on every rank, so that only the draws can differ."""
    rows = make()

    def draws(rank: int, number: int, seed: int = 3) -> set[bytes]:
        loader = Rank(rows, rank, 2, batch=20, seed=seed, workers=workers)
        loader.loader.sampler.order = lambda: [0] * len(rows)
        return {image for step in loader.epoch(number) for image, _ in step}

    first = draws(0, 0)
    assert len(first) > 5
    assert draws(0, 0) == first
    assert len({frozenset(images) for images in (first, draws(1, 0), draws(0, 1), draws(0, 0, seed=4))}) == 4
