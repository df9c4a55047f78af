"""Image files in a folder per class: what is read, and one line for each way in which the folder can be wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from poseidon import data
from poseidon.data import photos
from poseidon.errors import UserError
from tests.data.folders import make_photos

SHAPE = [3, 16, 16]


def node(folder: Path | str, classes: object = 3, shape: object = SHAPE) -> dict:
    return {"_target_": "poseidon.data.imagefolder", "folder": folder, "image_shape": shape, "classes": classes}


def refused(folder: Path, classes: int = 3) -> str:
    """What the check says before anything is started; the data set says the same."""
    with pytest.raises(UserError) as at_check:
        data.check(node(str(folder), classes))
    with pytest.raises(UserError) as at_load:
        data.imagefolder(str(folder), SHAPE, classes)
    assert str(at_check.value) == str(at_load.value)
    assert "\n" not in str(at_check.value)
    return str(at_check.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_photos(tmp_path / "images")
    return tmp_path / "images"


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_are_cut_to_the_shape_and_in_the_order_of_the_names(channels: int, root: Path) -> None:
    data.check(node(str(root)))
    train, evaluation = data.imagefolder(str(root), [channels, 16, 24], 3)
    assert [len(train), len(evaluation)] == [12, 6]
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    image, label = train[5]
    assert (image.shape, image.dtype, label, label.dtype) == ((channels, 16, 24), torch.float32, 1, torch.int64)
    with pytest.raises(IndexError):
        train[12]
    for index, name in ((5, "train/n001/n001_1.png"), (11, "train/n002/n002_3.JPEG")):
        pixel = Image.open(root / name).convert("L" if channels == 1 else "RGB").getpixel((9, 9))
        mean, std = torch.tensor(photos._MEAN[channels]), torch.tensor(photos._STD[channels])
        assert torch.allclose(train[index][0].mean((1, 2)) * std + mean, torch.tensor(pixel) / 255, atol=0.02)


def test_evaluation_takes_the_middle_and_normalises(tmp_path: Path) -> None:
    make_photos(tmp_path, classes=1, train=1, val=1)
    image = Image.new("RGB", (300, 200), (255, 0, 0))
    image.paste((0, 255, 0), (50, 0, 250, 200))  # all of the middle square
    image.save(tmp_path / "val" / "n000" / "n000_0.JPEG", quality=95)
    _, evaluation = data.imagefolder(str(tmp_path), SHAPE, 1)
    mean, std = (torch.tensor(values[3]).view(3, 1, 1) for values in (photos._MEAN, photos._STD))
    pixels = evaluation[0][0] * std + mean
    assert torch.allclose(pixels[1], torch.ones(16, 16), atol=0.02)
    assert torch.allclose(pixels[0], torch.zeros(16, 16), atol=0.02)
    assert torch.equal(evaluation[0][0], evaluation[0][0])


def test_training_cuts_at_random_as_seeded(root: Path) -> None:
    noise = Image.effect_noise((64, 64), 100).convert("RGB")
    noise.save(root / "train" / "n000" / "n000_0.JPEG")
    train, _ = data.imagefolder(str(root), SHAPE, 3)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(train.__getitems__([0, 0]).tensors[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0][0], draws[0][1])


def test_grey_palette_alpha_and_cmyk_images_are_read(root: Path) -> None:
    for number, mode in enumerate(("L", "P", "RGBA", "CMYK")):
        for name in ("n000_0.JPEG", "n000_1.png"):
            (root / "train" / "n000" / name).unlink(missing_ok=True)
        ending = "JPEG" if mode == "CMYK" else "PNG"
        Image.new(mode, (20, 20)).save(root / "train" / "n000" / f"more{number}.{ending}")
    train, _ = data.imagefolder(str(root), SHAPE, 3)
    images, labels = next(iter(DataLoader(train, len(train), collate_fn=data.collate)))
    assert images.shape == (14, *SHAPE)
    assert labels.bincount().tolist() == [6, 4, 4]


def test_nested_folders_links_and_other_files(root: Path) -> None:
    inner = root / "train" / "n001" / "images"
    inner.mkdir()
    shutil.move(root / "train" / "n001" / "n001_0.JPEG", inner / "näme \n.JPEG")
    (root / "train" / "n001" / "boxes.txt").write_text("not an image")
    (root / "train" / ".cache").mkdir()
    (root / "train" / "list.txt").write_text("beside the classes")
    (root / "val" / "n001" / "._n001_0.JPEG").write_bytes(b"what a Mac leaves")
    shutil.move(root / "val" / "n002", root / "elsewhere")
    (root / "val" / "n002").symlink_to(root / "elsewhere")
    data.check(node(str(root)))
    train, evaluation = data.imagefolder(str(root), SHAPE, 3)
    assert [len(train), len(evaluation)] == [12, 6]
    assert len(train.__getitems__(range(12))) == 12


def test_a_folder_that_is_not_there(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "none", root / "train" / "n000" / "n000_0.JPEG"):
        said = refused(place)
        assert all(words in said for words in (str(place), "train/<class>", "val/<class>", "dataset.folder"))
    shutil.rmtree(root / "val")
    assert "has no val/; it must hold" in refused(root)
    shutil.rmtree(root / "train")
    assert "has no train/; it must hold" in refused(root)
    (root / "train").mkdir()
    assert "train is empty" in refused(root)
    make_photos(tmp_path / "home" / "sets")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data.check(node("~/sets"))
    assert len(data.imagefolder("~/sets", SHAPE, 3)[0].__getitems__([0])) == 1


def test_flat_validation_images_are_the_commonest_mistake(root: Path) -> None:
    shutil.rmtree(root / "val")
    (root / "val").mkdir()
    for number in range(3):
        Image.new("RGB", (9, 9)).save(root / "val" / f"ILSVRC2012_val_{number:08}.JPEG")
    said = refused(root)
    assert "val holds 3 images and no class folders (the validation images of ILSVRC12 come like that)" in said
    assert "ILSVRC2012_validation_ground_truth.txt" in said


def test_classes_that_differ_or_are_of_another_number(root: Path) -> None:
    assert "has 3 class folders, but dataset.num_classes=1000: set dataset.num_classes=3" in refused(root, 1000)
    shutil.move(root / "val" / "n001", root / "val" / "n009")
    assert "class n001 is in train/ and not in val/ (3 classes in train/, 3 in val/)" in refused(root)
    shutil.rmtree(root / "train" / "n001")
    assert "class n009 is in val/ and not in train/ (2 classes in train/, 3 in val/)" in refused(root, 2)


@pytest.mark.parametrize("part", ["train", "val"])
def test_an_empty_class_is_named(part: str, root: Path) -> None:
    folder = root / part / "n001"
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "readme.txt").write_text("no image")
    assert f"{folder} holds no image (.jpg, .jpeg" in refused(root)


@pytest.mark.parametrize("harm", ["empty", "torn", "garbage", "gone", "folder"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_named_in_one_line(harm: str, workers: int, root: Path) -> None:
    train, _ = data.imagefolder(str(root), SHAPE, 3)
    path = root / "train" / "n001" / "n001_0.JPEG"
    whole = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm != "gone":
        path.write_bytes({"empty": b"", "torn": whole[: len(whole) // 2], "garbage": bytes(1000)}[harm])
    loader = DataLoader(train, batch_sampler=[[4]], num_workers=workers, collate_fn=data.collate)
    said = ""
    try:
        list(loader)
    except UserError as error:  # without its traceback, which would keep the loader's processes
        said = str(error.with_traceback(None))
    assert said.startswith(f"{path} cannot be read (")
    assert said.endswith("): replace or remove it")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": [4, 16, 16]}, "1 or 3 channels"),
        ({"shape": [3, 16]}, "1 or 3 channels"),
        ({"shape": None}, "image_shape=None"),
        ({"classes": 0}, "classes=0"),
        ({"folder": None}, "set dataset.folder"),
    ],
)
def test_arguments_that_cannot_be(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        data.check(node(**{"folder": "images", **changes}))
