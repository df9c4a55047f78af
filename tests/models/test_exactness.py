"""The networks through the engine: ranks together do what one process does."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from poseidon import models
from poseidon.training.losses import CrossEntropy
from tests.engine.nets import Batch, assert_equals_one_process

torch.set_num_threads(1)
Outputs = namedtuple("Outputs", "scores aux")


class TwoHeads(nn.Module):
    """As networks with auxiliary heads: a named tuple in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(64, 300), nn.Linear(300, 10), nn.Linear(300, 10)

    def forward(self, x: torch.Tensor) -> object:
        x = self.body(x).relu()
        return Outputs(self.head(x), self.aux(x)) if self.training else self.head(x)


@pytest.mark.parametrize("comm", ["hybrid", "ps", "sfb"])
@pytest.mark.parametrize("tied", [True, False])
def test_language_model_equals_one_process(comm: str, tied: bool) -> None:
    torch.manual_seed(0)
    base = models.transformer_lm([9], 32, width=16, heads=2, layers=2, tied=tied)
    loss = CrossEntropy(classes_dim=-1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch, session: object) -> None:
        text = data[0][:, :10].mul(1000).long() % 32
        loss(model(text[:, :-1]), text[:, 1:]).backward()

    assert_equals_one_process(base, [3, 5], comm, step)


@pytest.mark.parametrize("comm", ["hybrid", "ps"])
def test_auxiliary_heads_equal_one_process(comm: str) -> None:
    torch.manual_seed(0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch, session: object) -> None:
        CrossEntropy()(model(data[0]), data[1]).backward()

    assert_equals_one_process(TwoHeads(), [3, 5], comm, step)


def test_googlenet_equals_one_process() -> None:
    """With its batch-norms' statistics held fixed: those of a rank's own rows would differ."""
    torch.manual_seed(0)
    base = models.torchvision_model("googlenet", 10, [3, 32, 32], aux=True, dropout=0.0, dropout_aux=0.0)
    loss = CrossEntropy()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch, session: object) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        images = data[0].repeat(1, 48).reshape(-1, 3, 32, 32) + torch.linspace(0, 1, 3072).reshape(3, 32, 32)
        loss(model(images), data[1]).backward()

    assert_equals_one_process(base, [1, 2], "hybrid", step)
