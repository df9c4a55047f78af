"""What a network starts from."""

from __future__ import annotations

import torch
from torch import nn

from poseidon import models


def test_names_of_the_parameters_are_caffe_s():
    layers = ("conv1", "conv2", "ip1", "ip2")
    assert list(models.lenet().state_dict()) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def test_trying_out_a_size_leaves_the_weights_as_the_seed_has_them():
    torch.manual_seed(3)
    plain = models.torchvision_model("squeezenet1_1", 10)
    torch.manual_seed(3)
    tried = models.torchvision_model("squeezenet1_1", 10, [3, 64, 64])
    for a, b in zip(plain.parameters(), tried.parameters(), strict=True):
        assert torch.equal(a, b)


def test_torchvision_gets_its_own_arguments():
    model = models.torchvision_model("squeezenet1_1", 10, dropout=0.125)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.125]


def test_alexnet_s_dropout_is_an_argument():
    with torch.device("meta"):
        model = models.alexnet(dropout=0.25)
    assert [layer.p for layer in model if isinstance(layer, nn.Dropout)] == [0.25, 0.25]
