"""CIFAR-10 from a folder: both published layouts, what is missing or damaged, and the augmentation."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon import data
from poseidon.data import cifar, folders
from poseidon.data.images import shift_and_flip
from poseidon.errors import UserError
from tests.data.folders import ROWS, make_cifar

NODE = {"_target_": "poseidon.data.cifar10", "shape": [3, 32, 32], "num_classes": 10}


def refused(folder: Path | str) -> str:
    """What the check says before anything is started; the data set says the same."""
    with pytest.raises(UserError) as at_check:
        data.check({**NODE, "folder": str(folder)})
    with pytest.raises(UserError) as at_load:
        data.cifar10(str(folder))
    assert str(at_check.value) == str(at_load.value)
    assert "\n" not in str(at_check.value)
    return str(at_check.value)


@pytest.mark.parametrize("version", ["py", "bin"])
@pytest.mark.parametrize("inside", [True, False])
def test_both_layouts_and_the_folder_itself(
    version: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / f"cifar-10-batches-{version}" if inside else tmp_path / "mine"
    rows = make_cifar(place, version, monkeypatch)
    folder = str(tmp_path if inside else place)
    data.check({**NODE, "folder": folder})
    train, evaluation = data.cifar10(folder, augment=False)
    assert [len(train), len(evaluation)] == [5 * ROWS, ROWS]
    assert torch.cat([train.labels, evaluation.labels]).tolist() == rows[:, 0].tolist()
    image, label = evaluation[1]
    assert (image.shape, image.dtype, label.dtype) == ((3, 32, 32), torch.float32, torch.int64)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cifar._MEAN, cifar._STD))
    pixels = torch.from_numpy(rows[5 * ROWS + 1, 1:]).view(3, 32, 32) / 255
    assert torch.allclose(image, (pixels - mean) / std, atol=1e-5)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar(tmp_path / "sets" / "cifar-10-batches-bin", "bin", monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    data.check({**NODE, "folder": "~/sets"})
    assert len(data.cifar10("~/sets")[0]) == 5 * ROWS


def test_a_missing_folder_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data/cifar10", "."):
        said = refused(folder)
        for words in ("cifar-10-python.tar.gz", folders.CIFAR_HOME, "dataset.folder", "cifar-10-batches-py"):
            assert words in said
    (tmp_path / "file").write_text("not a folder")
    assert "CIFAR-10 is not there" in refused("file")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    assert "tar -xzf cifar-10-python.tar.gz" in refused(".")


@pytest.mark.parametrize("version", ["py", "bin"])
def test_missing_files_are_named(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / f"cifar-10-batches-{version}"
    make_cifar(place, version, monkeypatch)
    for file in sorted(place.iterdir())[1:3]:
        file.unlink()
    ending = ".bin" if version == "bin" else ""
    assert f"lacks data_batch_2{ending}, data_batch_3{ending}" in refused(tmp_path)


def test_a_file_of_the_wrong_size_or_with_a_wrong_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cifar-10-batches-bin"
    make_cifar(place, "bin", monkeypatch)
    file = place / "data_batch_3.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "data_batch_3.bin has 12,291 bytes instead of 12,292" in refused(tmp_path)
    file.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(UserError, match=r"data_batch_3.bin is damaged: it has a class 10"):
        data.cifar10(str(tmp_path))


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_but_the_published_bytes_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cifar-10-batches-py"
    make_cifar(place, "py", monkeypatch)
    data.cifar10(str(tmp_path))
    (place / "data_batch_2").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UserError, match=r"data_batch_2 is not the published file .* unpack the archive"):
        data.cifar10(str(tmp_path))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": [3, 64, 64]}, r"the images of cifar10 are \[3, 32, 32\]"),
        ({"num_classes": 5}, "set dataset.num_classes=10"),
        ({"augment": "yes"}, "augment=yes must be true or false"),
        ({"folder": None}, "set dataset.folder"),
        ({"folder": ""}, "set dataset.folder"),
    ],
)
def test_arguments_that_cannot_be(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        data.check({**NODE, **changes})


def test_an_augmented_image_is_a_window_of_the_padded_one_or_its_mirror() -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (400, 3, 6, 5), dtype=torch.uint8)
    changed = shift_and_flip(2)(images)
    assert (changed.shape, changed.dtype) == (images.shape, torch.uint8)
    padded = torch.nn.functional.pad(images, (2,) * 4)
    seen = set()
    for row, image in enumerate(changed):
        windows = {
            (top, left, flip): window.flip(-1) if flip else window
            for top in range(5)
            for left in range(5)
            for flip in (False, True)
            for window in [padded[row, :, top : top + 6, left : left + 5]]
        }
        places = [place for place, window in windows.items() if torch.equal(window, image)]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) == 50  # every place and both ways round
    assert not torch.equal(shift_and_flip(2)(images), changed)
    torch.manual_seed(0)
    torch.randint(1, 256, (400, 3, 6, 5), dtype=torch.uint8)
    assert torch.equal(shift_and_flip(2)(images), changed)


def test_only_training_rows_are_augmented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar(tmp_path / "cifar-10-batches-bin", "bin", monkeypatch)
    train, evaluation = data.cifar10(str(tmp_path))
    before = train.images.clone()
    draws = [train.__getitems__([3, 1]).tensors for _ in range(2)]
    assert not torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])
    assert torch.equal(train.images, before)  # what is kept stays as it is
    assert np.array_equal(*(evaluation.__getitems__([0, 1]).tensors[0] for _ in range(2)))
    assert len(train.__getitems__([])) == 0
