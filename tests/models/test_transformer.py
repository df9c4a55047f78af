"""The language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poseidon import models
from poseidon.errors import UserError
from poseidon.training.losses import CrossEntropy


def small(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return models.transformer_lm([12], 20, **{"width": 16, "heads": 4, "layers": 2, **options})


def text(rows: int = 3, positions: int = 12) -> torch.Tensor:
    return torch.randint(0, 20, (rows, positions), generator=torch.Generator().manual_seed(1))


def test_scores_of_a_position_depend_on_earlier_tokens_only() -> None:
    model, ids = small().eval(), text()
    scores = model(ids)
    assert scores.shape == (3, 12, 20)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 20
    torch.testing.assert_close(model(changed)[:, :7], scores[:, :7])
    assert not torch.allclose(model(changed)[:, 7], scores[:, 7])
    torch.testing.assert_close(model(ids[:, :5]), scores[:, :5])  # a shorter row


def test_starts_knowing_nothing() -> None:
    loss = CrossEntropy(classes_dim=-1)(small(tied=False)(text()), text()).detach()
    assert abs(float(loss) - torch.tensor(20.0).log()) < 0.05


def test_tied_head_is_one_parameter_under_both_names() -> None:
    tied, untied = small(), small(tied=False)
    assert list(tied.state_dict()) == list(untied.state_dict())
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    untied.load_state_dict(tied.state_dict())
    torch.testing.assert_close(untied(text()), tied(text()))
    tied(text()).sum().backward()
    assert all(p.grad is not None for p in tied.parameters())


def test_learns_a_text() -> None:
    model, ids = small(), torch.arange(13).repeat(4, 1) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = torch.tensor(0.0)
    for _ in range(60):
        loss = CrossEntropy(classes_dim=-1)(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_dropout_is_off_in_evaluation() -> None:
    model = small(dropout=0.5)
    assert not torch.equal(model(text()), model(text()))
    model.eval()
    assert torch.equal(model(text()), model(text()))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 12), r"takes token ids \(int64\), the data set gives torch.float32"),
        (torch.zeros(2, 13, dtype=torch.int64), r"at most 12 tokens \(dataset.shape\), the data set gives \[13\]"),
        (torch.zeros(2, 0, dtype=torch.int64), "at most 12 tokens"),
        (torch.zeros(2, dtype=torch.int64), "at most 12 tokens"),
        (torch.full((2, 3), 20), r"has 20 tokens \(dataset.num_classes\), the data set gives ids from 20 to 20"),
        (torch.full((2, 3), -1), "ids from -1 to -1"),
    ],
)
def test_says_in_one_line_what_it_does_not_take(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=rf"^transformer_lm [^\n]*{message}[^\n]*$"):
        small()(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads=3 must divide width=16"),
        ({"heads": 0}, "heads=0 must be a positive"),
        ({"width": 16.0}, "width=16.0 must be a positive"),
        ({"mlp_ratio": -1}, "mlp_ratio=-1"),
        ({"dropout": "a"}, "dropout=a must be at least 0"),
    ],
)
def test_sizes_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)


def test_gated_and_fused_blocks_and_a_width_that_is_no_multiple() -> None:
    model = small(fused=True, gated=True, mlp_width=24)
    linears = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    block = {name.removeprefix("blocks.1."): shape for name, shape in linears.items() if name.startswith("blocks.1.")}
    assert block == {"qkv": (48, 16), "out": (16, 16), "gate": (24, 16), "up": (24, 16), "down": (16, 24)}
    assert model(text()).shape == (3, 12, 20)
    with pytest.raises(UserError, match="mlp_width=0"):
        small(mlp_width=0)


def test_fused_is_the_same_function() -> None:
    plain, fused = small(), small(fused=True)
    state = plain.state_dict()
    for place in ("weight", "bias"):
        for block in ("blocks.0", "blocks.1"):
            state[f"{block}.qkv.{place}"] = torch.cat([state.pop(f"{block}.{part}.{place}") for part in "qkv"])
    fused.load_state_dict(state)
    torch.testing.assert_close(fused(text()), plain(text()))
