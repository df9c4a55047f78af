"""Glyphs: any size, any number of classes, and the same rows wherever and however they are drawn."""

from __future__ import annotations

import sys
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from poseidon import data
from poseidon.data import drawn
from poseidon.data.images import Stored
from poseidon.errors import UserError


def small(**changes):
    return data.glyphs(**{"image_shape": [1, 16, 16], "classes": 10, "size": 60, "eval_size": 20, **changes})


def all_rows(part):
    return part.__getitems__(range(len(part))).tensors


def test_rows_are_normalised_images_and_classes_of_equal_frequency() -> None:
    train, evaluation = small(size=400)
    assert [len(train), len(evaluation)] == [400, 20]
    images, labels = all_rows(train)
    assert (images.shape, images.dtype, labels.dtype) == ((400, 1, 16, 16), torch.float32, torch.int64)
    assert labels.bincount().tolist() == [40] * 10
    assert abs(images.mean()) < 0.2
    assert 0.8 < images.std() < 1.2
    image, label = train[17]
    assert (label.shape, label) == ((), 7)
    assert torch.equal(image, images[17])
    assert len(images.flatten(1).unique(dim=0)) == 400  # each drawn anew
    with pytest.raises(IndexError):
        train[400]


def test_a_row_depends_on_seed_part_and_index_only(cache: Path) -> None:
    train, evaluation = small()
    images = all_rows(train)[0]
    torch.manual_seed(5)
    assert torch.equal(all_rows(small(size=70)[0])[0][:60], images)  # whatever the number of rows
    assert torch.equal(all_rows(small()[0])[0], images)  # from the cache
    for file in cache.iterdir():
        file.unlink()
    assert torch.equal(all_rows(small()[0])[0], images)  # drawn again
    assert not torch.equal(all_rows(small(seed=1)[0])[0], images)
    assert not torch.equal(all_rows(evaluation)[0], images[:20])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_too_large_to_keep_is_drawn_as_it_is_fetched(
    workers: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = small(image_shape=[3, 20, 24])[0]
    assert isinstance(kept, Stored)
    for file in cache.iterdir():
        file.unlink()
    monkeypatch.setattr(drawn, "_MOST_KEPT", 3 * 20 * 24 * 60 - 1)
    lazy = small(image_shape=[3, 20, 24])[0]
    assert isinstance(lazy, drawn.Drawn)
    loader = DataLoader(lazy, batch_sampler=[[5, 59], [0], [5]], num_workers=workers, collate_fn=data.collate)
    for (images, labels), indices in zip(loader, [[5, 59], [0], [5]], strict=True):
        assert torch.equal(images, all_rows(kept)[0][indices])
        assert labels.tolist() == [index % 10 for index in indices]


def test_another_set_is_never_taken_from_the_cache() -> None:
    sets = [small(), small(classes=11), small(image_shape=[1, 16, 18]), small(seed=2), small(size=61)]
    assert [tuple(part.images.shape) for part, _ in sets] == [
        (60, 1, 16, 16),
        (60, 1, 16, 16),
        (60, 1, 16, 18),
        (60, 1, 16, 16),
        (61, 1, 16, 16),
    ]
    assert all(
        not torch.equal(a.images, b.images) for (a, _), (b, _) in pairwise(sets) if a.images.shape == b.images.shape
    )


def test_every_class_has_a_string_of_its_own_whatever_the_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "_MOST_KEPT", 0)
    words = [drawn.word(k) for k in range(21_841)]
    assert words[:11] == [*"0123456789A"]
    assert len(set(words)) == 21_841
    assert {len(word) for word in words} == {1, 2, 3}
    assert drawn.word(45) == "00"
    train, _ = small(classes=21_841, size=21_841)
    assert torch.equal(train.labels, torch.arange(21_841))
    assert all(train[row][0].std() > 0.1 for row in (0, 50, 21_840))


def test_many_classes_share_what_they_look_like_with_few() -> None:
    """Class 3 is the same string among 10 and among 100: its mean image says so."""
    few, many = small(size=600)[0], small(classes=100, size=4000)[0]
    mean = few.images[few.labels == 3].float().mean(0)
    other = few.images[few.labels == 7].float().mean(0)
    found = many.images[many.labels == 3].float().mean(0)
    assert (found - mean).square().mean() < (found - other).square().mean()


@pytest.mark.parametrize("shape", [[1, 8, 8], [3, 8, 40], [1, 64, 9], [3, 224, 224]])
@pytest.mark.parametrize("classes", [1, 3000])
def test_any_shape(shape: list[int], classes: int) -> None:
    train, _ = data.glyphs(shape, classes, size=3, eval_size=1)
    images, labels = next(iter(DataLoader(train, 3, collate_fn=data.collate)))
    assert list(images.shape) == [3, *shape]
    assert labels.max() < classes
    assert all(image.std() > 0.1 for image in images)


def test_the_fonts_are_text_fonts_of_matplotlib_which_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    names = [Path(font).stem for font in drawn._fonts()]
    assert "matplotlib" not in sys.modules
    assert {"DejaVuSans", "DejaVuSerif-Italic", "DejaVuSansMono-Bold", "STIXGeneralBolIta"} <= {*names}
    assert not [name for name in names if name.startswith(("cm", "STIXNon", "STIXSiz", "Last")) or "Display" in name]


def test_without_fonts_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, SimpleNamespace(submodule_search_locations=[str(tmp_path)])):
        monkeypatch.setattr(drawn, "find_spec", lambda name, found=found: found)
        with pytest.raises(UserError, match="pip install matplotlib"):
            small()


def test_what_is_drawn_can_be_learnt() -> None:
    """The nearest mean image tells many of ten digits: labels and images belong together."""
    train, evaluation = small(size=2000, eval_size=400)
    (images, labels), (others, right) = all_rows(train), all_rows(evaluation)
    centres = torch.stack([images[labels == k].mean(0).flatten() for k in range(10)])
    near = torch.nn.functional.normalize(others.flatten(1) - others.flatten(1).mean(1, True))
    far = torch.nn.functional.normalize(centres - centres.mean(1, True))
    assert ((near @ far.T).argmax(1) == right).float().mean() > 0.4  # 0.1 by chance
    assert len(list(islice(train, 2))) == 2
