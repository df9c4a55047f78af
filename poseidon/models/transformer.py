"""A small decoder-only language model, all of whose matrices but the embedding are plain linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from poseidon.errors import UserError
from poseidon.models.sizes import check_positive, check_transformer


def transformer_lm(
    shape: Sequence[int],
    num_classes: int,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    mlp_ratio: int = 4,
    dropout: float = 0.0,
    tied: bool = True,
    mlp_width: int | None = None,
    gated: bool = False,
    fused: bool = False,
) -> nn.Module:
    """A :class:`TransformerLM`; 817,920 parameters by default, with 64 positions and 128 tokens.

    Args:
        shape: [positions], the longest row that it takes.
        num_classes: tokens of the vocabulary.
        width: of the residual stream; shared by the heads.
        mlp_ratio: width of the hidden layer of each MLP, in widths.
        dropout: probability, of embeddings and of what each block adds.
        tied: the output's weight is that of the embedding: one parameter under two names.
        mlp_width: that width itself, where it is no multiple.
        gated: each MLP is down(silu(gate(x)) * up(x)), as in LLaMA; else down(gelu(up(x))), as in GPT-2.
        fused: queries, keys and values come from one linear layer, as in GPT-2.

    Raises:
        UserError: a size is none, or the heads do not divide the width.
    """
    check_positive(num_classes=num_classes)
    check_transformer(shape, width=width, heads=heads, layers=layers, mlp_ratio=mlp_ratio, dropout=dropout)
    if mlp_width is not None:
        check_positive(mlp_width=mlp_width)
    sizes = (shape[0], num_classes, width, heads, layers, mlp_ratio, dropout, tied)
    return TransformerLM(*sizes, mlp_width=mlp_width, gated=gated, fused=fused)


class TransformerLM(nn.Module):
    """Token ids (rows, positions) to scores of the next token (rows, positions, vocabulary).

    Pre-norm blocks, learned positions; each linear layer sees K = rows x positions rows.

    Raises:
        UserError: in ``forward``, on inputs that are no token ids of this vocabulary, or longer than the positions.
    """

    def __init__(
        self,
        positions: int,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        mlp_ratio: int,
        dropout: float,
        tied: bool,
        *,
        mlp_width: int | None = None,
        gated: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(positions, width))
        self.drop = nn.Dropout(dropout)
        hidden = mlp_width or mlp_ratio * width
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden, dropout, gated=gated, fused=fused) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._start(layers)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        self._check(ids)
        try:
            x = self.tokens(ids)
        except IndexError as error:
            raise UserError(
                f"transformer_lm has {self.tokens.num_embeddings} tokens (dataset.num_classes), the data set gives "
                f"ids from {int(ids.min())} to {int(ids.max())}"
            ) from error
        x = self.drop(x + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores

    def _check(self, ids: Tensor) -> None:
        most = len(self.positions)
        if ids.dtype not in (torch.int64, torch.int32):
            raise UserError(f"transformer_lm takes token ids (int64), the data set gives {ids.dtype}: try dataset=text")
        if ids.dim() != 2 or not 0 < ids.shape[1] <= most:
            raise UserError(
                f"transformer_lm was built for rows of at most {most} tokens (dataset.shape), the data set gives "
                f"{list(ids.shape[1:])}"
            )

    def _start(self, layers: int) -> None:
        """As GPT-2: what adds to the residual stream starts smaller, the more layers add to it."""
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention to earlier positions, then an MLP, each added to what came in: (rows, positions, width) to the same."""

    def __init__(
        self, width: int, heads: int, mlp_width: int, dropout: float, *, gated: bool = False, fused: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.gated, self.fused = heads, gated, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if fused:
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        else:
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        if gated:
            self.gate = nn.Linear(width, mlp_width)
        self.up, self.down = nn.Linear(width, mlp_width), nn.Linear(mlp_width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self._attend(self.norm1(x)))
        added: Tensor = self.drop(self.down(self._hidden(self.norm2(x))))
        return x + added

    def _hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.up(x)
        return functional.silu(self.gate(x)) * hidden if self.gated else functional.gelu(hidden)

    def _attend(self, x: Tensor) -> Tensor:
        whole = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in whole)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # (rows, heads, positions, width/heads)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined
