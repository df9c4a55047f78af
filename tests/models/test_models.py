"""The networks: their sizes, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poseidon import models
from poseidon.config import conf_dir
from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.errors import UserError
from poseidon.models.sizes import LAYOUT, LEAST, check_images
from poseidon.training.losses import CrossEntropy

Maker = Callable[..., nn.Module]
CAFFE: dict[str, tuple[Maker, int]] = {  # with the channels of their usual input
    "lenet": (models.lenet, 1),
    "cifar10_quick": (models.cifar10_quick, 3),
    "alexnet": (models.alexnet, 3),
}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "args", "count"),
    [
        (models.lenet, {}, 431_080),
        (models.cifar10_quick, {}, 145_578),
        (models.alexnet, {}, 60_965_224),
        (models.alexnet, {"shape": [3, 224, 224]}, 60_965_224),
        (models.mlp, {"shape": [1, 8, 8], "num_classes": 10, "widths": [32]}, 64 * 32 + 32 + 32 * 10 + 10),
        (models.mlp, {"shape": [1, 8, 8], "num_classes": 10, "widths": []}, 64 * 10 + 10),
        (models.alexnet, {"num_classes": 21841, "widths": [3000, 3000]}, 104_532_921),
        (models.torchvision_model, {"arch": "vgg19", "num_classes": 1000}, 143_667_240),
        (models.torchvision_model, {"arch": "vgg19", "num_classes": 21841}, 229_052_817),
        (models.torchvision_model, {"arch": "googlenet", "num_classes": 1000, "aux": True}, 13_004_888),
        (models.torchvision_model, {"arch": "googlenet", "num_classes": 1000}, 6_624_904),
        (models.torchvision_model, {"arch": "inception_v3", "num_classes": 1000, "aux": True}, 27_161_264),
        (models.torchvision_model, {"arch": "resnet50", "num_classes": 1000}, 25_557_032),
        (models.torchvision_model, {"arch": "resnet152", "num_classes": 1000}, 60_192_808),
        (models.transformer_lm, {"shape": [64], "num_classes": 128}, 817_920),
        (models.transformer_lm, {"shape": [64], "num_classes": 128, "tied": False}, 817_920 + 128 * 128),
    ],
)
def test_counts_its_parameters(make: Maker, args: dict[str, Any], count: int) -> None:
    with torch.device("meta"):  # the published figures; nothing is allocated
        assert parameters(make(**args)) == count


@pytest.mark.parametrize("name", CAFFE)
def test_takes_exactly_the_sizes_it_says(name: str) -> None:
    """The sizes worked out without torch are those of the layers, from the smallest image on."""
    make, channels = CAFFE[name]
    with pytest.raises(UserError, match=rf"{name} needs images of at least \d+x\d+; .* 1x1$") as caught:
        make(shape=[channels, 1, 1])
    least = int(str(caught.value).split("at least ")[1].split("x")[0])
    with pytest.raises(UserError):
        make(shape=[channels, least, least - 1])
    with torch.device("meta"), torch.no_grad():
        for side in range(least, least + 20):
            model = make(shape=[channels, side, least], num_classes=7)
            assert model(torch.empty(2, channels, side, least)).shape == (2, 7)


@pytest.mark.parametrize("name", LAYOUT)
@pytest.mark.parametrize("shape", [[], [28, 28], [0, 28, 28], [1, 28.0, 28], ["1", 28, 28], [True, 28, 28]])
def test_refuses_what_is_no_image(name: str, shape: list[Any]) -> None:
    with pytest.raises(UserError, match=rf"^{name} needs images: .*\[channels, height, width\]"):
        CAFFE[name][0](shape=shape)


@pytest.mark.parametrize(
    ("make", "args"),
    [
        (models.lenet, {"num_classes": 0}),
        (models.alexnet, {"num_classes": "10"}),
        (models.mlp, {"shape": [4], "num_classes": -1}),
        (models.mlp, {"shape": [4], "num_classes": 2, "widths": [0]}),
        (models.mlp, {"shape": [0], "num_classes": 2}),
        (models.torchvision_model, {"arch": "resnet18", "num_classes": 0}),
        (models.transformer_lm, {"shape": [8], "num_classes": 0}),
        (models.transformer_lm, {"shape": [8], "num_classes": 9, "layers": 0}),
        (models.alexnet, {"widths": [4096, 0]}),
    ],
)
def test_refuses_a_number_that_is_none(make: Maker, args: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*must be (a )?positive whole number[^\n]*$"):
        make(**args)


def test_says_in_one_line_that_the_data_has_another_shape() -> None:
    with pytest.raises(UserError, match=r"^lenet was built for inputs of \[1, 28, 28\].*\[3, 28, 28\]$"):
        models.lenet()(torch.zeros(2, 3, 28, 28))


def test_gradients_reach_every_layer() -> None:
    model = models.cifar10_quick()
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("arch", "aux"),
    [("vgg19", False), ("resnet50", False), ("googlenet", True), ("inception_v3", True), ("inception_v3", False)],
)
def test_smallest_images_of_torchvision_s_are_as_they_say(arch: str, aux: bool) -> None:
    """What is said without torch is what the layers take, in training."""
    with torch.device("meta"), torch.no_grad():
        model = models.torchvision_model(arch, 7, aux=aux).train()
        least = LEAST[arch][0 if aux else 1]
        check_images(arch, [3, least, least], aux)
        model(torch.empty(2, 3, least, least))
        if least > 1:
            with pytest.raises(RuntimeError):
                model(torch.empty(2, 3, least - 1, least))
            with pytest.raises(UserError, match=f"^{arch} needs images of at least {least}x{least}"):
                check_images(arch, [3, least - 1, least], aux)
    with pytest.raises(UserError, match=rf"^{arch} needs images of 3 channels, dataset.shape=\[1, 299, 299\] has 1$"):
        check_images(arch, [1, 299, 299], aux)


def test_auxiliary_heads_give_a_tuple_in_training_and_learn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, *args, **kwargs: tensor)  # takes seconds
    model = models.torchvision_model("googlenet", 5, [3, 32, 32], aux=True)
    output = model(torch.randn(2, 3, 32, 32))
    assert [scores.shape for scores in output] == [(2, 5)] * 3
    CrossEntropy()(output, torch.tensor([1, 2])).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_auxiliary_heads_where_there_are_none() -> None:
    with pytest.raises(UserError, match=r"^model.aux=true: resnet18 has no auxiliary heads"):
        models.torchvision_model("resnet18", 5, aux=True)


def test_a_network_that_cannot_be_tried_out_is_made_all_the_same() -> None:
    assert models.torchvision_model("regnet_y_400mf", 5, [3, 32, 32])(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_heads_have_none_and_warn_of_nothing(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their weights' start takes seconds, and is torchvision's.
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, *args, **kwargs: tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = models.torchvision_model(arch, 5, shape=[3, 299, 299])
    with torch.no_grad():
        assert model.train()(torch.zeros(2, 3, 96, 96)).shape == (2, 5)  # a tensor, not a tuple of heads


def test_torchvision_names() -> None:
    with pytest.raises(UserError, match=r"^[^\n]*model.name=resnet19[^\n]*nearest: [^\n]*resnet18[^\n]*$"):
        models.torchvision_model("resnet19", 10)
    for arch in ("fcn_resnet50", "fasterrcnn_resnet50_fpn", "r3d_18", "quantized_resnet18"):
        with pytest.raises(UserError, match=rf"^model.name={arch} is no image classifier[^\n]*$"):
            models.torchvision_model(arch, 10)


def test_torchvision_size_is_tried_out_before_memory_is_taken() -> None:
    with pytest.raises(UserError, match=r"^model.name=vit_b_16 cannot take images of dataset.shape=\[3, 32, 32\]"):
        models.torchvision_model("vit_b_16", 10, shape=[3, 32, 32])
    before = torch.get_rng_state()
    models.torchvision_model("resnet18", 10)
    alone = torch.get_rng_state()
    torch.set_rng_state(before)
    models.torchvision_model("resnet18", 10, shape=[3, 64, 64])
    assert torch.equal(alone, torch.get_rng_state())  # replicas start alike whether or not a shape was given


NATIVE = {"shape": [3, 224, 224], "num_classes": 1000}
TORCHVISION = {"_target_": "poseidon.models.torchvision_model", "num_classes": 2, "shape": [3, 64, 64]}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "poseidon.models.lenet", "shape": [1, 8, 8], "num_classes": 10}, "at least"),
        ({"_target_": "poseidon.models.mlp", "shape": [1, 8, 8], "num_classes": 0}, "num_classes=0"),
        (TORCHVISION | {"arch": "resnet1"}, "nearest"),
        (TORCHVISION | {"arch": "resnet18", "shape": [64]}, "cannot take images"),
        (TORCHVISION | {"arch": "resnet18", "depth": 3}, "refused its arguments: .*depth"),
        (TORCHVISION | {"arch": "resnet18", "aux": True, "native": NATIVE}, "no auxiliary heads; [^;]* have$"),
        (
            TORCHVISION | {"arch": "vgg19", "shape": [1, 28, 28], "native": NATIVE},
            r"3 channels.*; it is made for dataset.shape=\[3,224,224\] dataset.num_classes=1000, "
            "which dataset=synthetic has$",
        ),
        (TORCHVISION | {"arch": "vgg19", "shape": [3, 28, 28]}, "at least 32x32; dataset.shape says 28x28$"),
        (TORCHVISION | {"arch": "inception_v3", "aux": True}, "299x299 .with model.aux=false 75x75.; .*64x64$"),
        ({"_target_": "poseidon.models.transformer_lm", "shape": [1, 28, 28]}, r"\[positions\], is \[1, 28, 28\]"),
        ({"_target_": "poseidon.models.transformer_lm", "shape": [9], "width": 9, "heads": 2}, "heads=2 must divide"),
        ({"_target_": "poseidon.models.transformer_lm", "shape": [9], "dropout": 1}, "dropout=1 must be"),
        (TORCHVISION | {"arch": "resnet18", "weights": None, "fresh": [], "native": NATIVE}, None),
        (TORCHVISION | {"arch": "regnet_y_400mf"}, None),
        ({"_target_": "elsewhere.lenet", "shape": [1, 8, 8], "num_classes": 0}, None),
    ],
)
def test_check_before_anything_starts(node: dict[str, Any], message: str | None) -> None:
    if message is None:
        models.check(node)
        return
    with pytest.raises(UserError, match=message) as caught:
        models.check(node)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("node", [{"_target_": "elsewhere.net"}, {"_target_": "poseidon.models.lenet"}])
def test_weights_that_are_no_file_are_said_before_anything_starts(node: dict[str, Any], tmp_path: Path) -> None:
    for weights, message in ((tmp_path / "none.pt", "there is no file"), (tmp_path, "is a folder")):
        with pytest.raises(UserError, match=rf"^model.weights={weights}: [^\n]*{message}[^\n]*$"):
            models.check({**node, "weights": str(weights)})


def test_relative_weights_are_those_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.pt").touch()
    monkeypatch.chdir(tmp_path)
    assert models.find_weights("w.pt") == tmp_path / "w.pt"


@pytest.mark.parametrize("name", sorted(file.stem for file in (conf_dir() / "model").glob("*.yaml")))
def test_every_model_of_conf_is_made_on_the_data_it_says_it_is_made_for(name: str) -> None:
    named = ["model.name=resnet18"] if name == "torchvision" else []
    config = compose("train", [f"model={name}", "dataset=synthetic", *named])
    models.check(config.model)
    assert config.model["shape"] == config.dataset["shape"] == config.model["native"]["shape"]
    assert (config.model["weights"], config.model["fresh"]) == (None, [])
    with torch.device("meta"), torch.no_grad():
        model = build(config.model)
        dtype = getattr(torch, config.dataset["dtype"])
        output = model.eval()(torch.empty(2, *config.model["shape"], dtype=dtype))
    assert output.shape[output.dim() - 1] == config.model["num_classes"]
    first = (conf_dir() / "model" / f"{name}.yaml").read_text().partition("\n")[0]
    assert first.startswith("# ")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, poseidon.models; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="resnet"):
        models.resnet  # noqa: B018
