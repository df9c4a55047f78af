"""Every kind of layer, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.matrix.harness import COMMS, SIZES, Case, assert_equals_one_process, images, tokens, vectors


class Lambda(nn.Module):
    """Layers, and what to do with them."""

    def __init__(self, forward: Any, **layers: Any) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Pruned(nn.Sequential):
    """Copied anew: PyTorch cannot deepcopy a pruned module, whose weight is no leaf."""

    def __init__(self) -> None:
        layer = nn.Linear(6, 8)
        torch.manual_seed(1)
        prune.random_unstructured(layer, "weight", amount=0.3)
        super().__init__(layer, nn.Tanh(), nn.Linear(8, 4))

    def __deepcopy__(self, memo: Any) -> Pruned:
        other = Pruned()
        other.load_state_dict(self.state_dict())
        return other


def one_by_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Rows as 1-D inputs."""
    return torch.stack([self.b(torch.tanh(self.a(row))) for row in x])


def embed_bag(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.out(self.bag(x))


def last_state(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.out(self.rnn(x)[0][:, -1])


def complex_product(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.to(torch.complex64) @ self.w).flatten(1)


CASES = {
    "linear 2-D": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), vectors(6)),
    "linear 1-D": Case(lambda: Lambda(one_by_one, a=nn.Linear(6, 8), b=nn.Linear(8, 4)), vectors(6)),
    "linear 3-D": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)), images(3, 6)),
    "linear 5-D": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), images(2, 3, 2, 6)),
    "linear without bias": Case(
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)), vectors(6)
    ),
    "weight norm": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4)), vectors(6)
    ),
    "orthogonal": Case(
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 4)), vectors(6)
    ),
    "pruned": Case(Pruned, vectors(6)),
    "bilinear": Case(lambda: Lambda(lambda s, x: s.a(x, x), a=nn.Bilinear(6, 6, 4)), vectors(6)),
    "attention": Case(
        lambda: Lambda(lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)), images(5, 8)
    ),
    "transformer layer": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), images(5, 8)
    ),
    "transformer": Case(
        lambda: Lambda(lambda s, x: s.a(x, x), a=nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)),
        images(5, 8),
    ),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(30, 6), nn.Flatten(), nn.Linear(24, 4)), tokens(30, 4)),
    "embedding, padding": Case(
        lambda: nn.Sequential(nn.Embedding(30, 6, padding_idx=3), nn.Flatten(), nn.Linear(24, 4)), tokens(30, 4)
    ),
    "embedding, sparse": Case(
        lambda: nn.Sequential(nn.Embedding(30, 6, sparse=True), nn.Flatten(), nn.Linear(24, 4)),
        tokens(30, 4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    ),
    "embedding bag": Case(lambda: Lambda(embed_bag, bag=nn.EmbeddingBag(30, 6), out=nn.Linear(6, 4)), tokens(30, 4)),
    "embedding bag, sparse": Case(
        lambda: Lambda(embed_bag, bag=nn.EmbeddingBag(30, 6, sparse=True, mode="sum"), out=nn.Linear(6, 4)),
        tokens(30, 4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    ),
    "conv 1-D": Case(lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh()), images(3, 9)),
    "conv 3-D": Case(lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Tanh()), images(2, 4, 4, 4)),
    "conv grouped, dilated": Case(lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=1), images(4, 7, 7)),
    "conv depthwise": Case(lambda: nn.Conv2d(4, 8, 3, groups=4), images(4, 6, 6)),
    "conv transposed": Case(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), images(4, 4, 4)),
    "channels last": Case(
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 2)).to(memory_format=torch.channels_last),
        lambda generator, rows: (
            torch.randn(rows, 4, 6, 6, generator=generator).contiguous(memory_format=torch.channels_last),
        ),
    ),
    "lstm": Case(
        lambda: Lambda(last_state, rnn=nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True), out=nn.Linear(12, 4)),
        images(4, 5),
    ),
    "gru": Case(lambda: Lambda(last_state, rnn=nn.GRU(5, 6, batch_first=True), out=nn.Linear(6, 4)), images(4, 5)),
    "lstm cell": Case(
        lambda: Lambda(lambda s, x: s.cell(x[:, 1], s.cell(x[:, 0]))[0], cell=nn.LSTMCell(5, 6)), images(2, 5)
    ),
    "layer, group and instance norm": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.InstanceNorm2d(4, affine=True),
            nn.Tanh(),
            nn.Flatten(),
            nn.LayerNorm(64),
            nn.Tanh(),
            nn.Linear(64, 4),
        ),
        images(3, 6, 6),
    ),
    "prelu": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 4)), vectors(6)),
    "0-d and empty": Case(
        lambda: Lambda(
            lambda s, x: s.a(x) * s.scale + s.nothing.sum(),
            a=nn.Linear(6, 4),
            scale=nn.Parameter(torch.tensor(0.5)),
            nothing=nn.Parameter(torch.empty(0, 3)),
        ),
        vectors(6),
    ),
    "complex": Case(
        lambda: Lambda(complex_product, w=nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))), vectors(6)
    ),
    "large weights": Case(lambda: nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 200)), vectors(64)),
    "float64": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(),
        lambda generator, rows: (torch.randn(rows, 6, generator=generator, dtype=torch.float64),),
    ),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, sizes: list[int], comm: str) -> None:
    assert_equals_one_process(CASES[name], comm, sizes)
