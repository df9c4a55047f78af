"""The networks: their sizes, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poseidon import models
from poseidon.errors import UserError
from poseidon.models.sizes import LAYOUT

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
        (models.torchvision_model, {"arch": "vgg19", "num_classes": 1000}, 143_667_240),
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


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "poseidon.models.lenet", "shape": [1, 8, 8], "num_classes": 10}, "at least"),
        ({"_target_": "poseidon.models.mlp", "shape": [1, 8, 8], "num_classes": 0}, "num_classes=0"),
        ({"_target_": "poseidon.models.torchvision_model", "arch": "resnet1", "num_classes": 2}, "nearest"),
        ({"_target_": "elsewhere.lenet", "shape": [1, 8, 8], "num_classes": 0}, None),
    ],
)
def test_check_before_anything_starts(node: dict[str, Any], message: str | None) -> None:
    if message is None:
        models.check(node)
        return
    with pytest.raises(UserError, match=message):
        models.check(node)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, poseidon.models; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="resnet"):
        models.resnet  # noqa: B018
