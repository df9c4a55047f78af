"""Cross-entropy of plain scores, of auxiliary heads and of positions; and the metric that goes with it."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.errors import UserError
from poseidon.training.losses import CrossEntropy
from poseidon.training.metrics import accuracy

Outputs = namedtuple("Outputs", "logits aux2 aux1")


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def classes(*shape: int, count: int = 5) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(9))


def value_and_gradient(loss: nn.Module, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = loss(output, target)
    return result, *torch.autograd.grad(result, output)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("output", "target"),
    [
        (scores(7, 5), classes(7)),
        (scores(7, 5), classes(7).masked_fill(torch.arange(7) < 3, -100)),
        (scores(7, 5), scores(7, 5).detach().softmax(1)),
        (scores(3, 5, 4, 4), classes(3, 4, 4)),
        (scores(5), classes(1)[0]),
    ],
)
def test_of_plain_scores_is_torch_s_bit_for_bit(output: torch.Tensor, target: torch.Tensor, smoothing: float) -> None:
    got = value_and_gradient(CrossEntropy(label_smoothing=smoothing), output, target)
    want = value_and_gradient(nn.CrossEntropyLoss(label_smoothing=smoothing), output, target)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("probabilities", [False, True])
def test_classes_last_is_the_mean_over_all_positions(smoothing: float, probabilities: bool) -> None:
    output = scores(3, 6, 5)
    target = scores(3, 6, 5, seed=2).detach().softmax(-1) if probabilities else classes(3, 6)
    second = target.movedim(-1, 1) if probabilities else target
    got = value_and_gradient(CrossEntropy(-1, label_smoothing=smoothing), output, target)
    loss = nn.CrossEntropyLoss(label_smoothing=smoothing)(output.movedim(-1, 1), second)
    torch.testing.assert_close(got, (loss, *torch.autograd.grad(loss, output)))
    assert torch.equal(CrossEntropy(-1)(scores(7, 5), classes(7)), CrossEntropy()(scores(7, 5), classes(7)))


@pytest.mark.parametrize("make", [Outputs, lambda *heads: heads, lambda *heads: list(heads)])
def test_auxiliary_heads_count_with_their_weight(make: Any) -> None:
    main, first, second, target = scores(7, 5), scores(7, 5, seed=1), scores(7, 5, seed=2), classes(7)
    plain = nn.CrossEntropyLoss()
    loss = CrossEntropy(auxiliary_weight=0.4)
    want = plain(main, target) + 0.4 * (plain(first, target) + plain(second, target))
    torch.testing.assert_close(loss(make(main, first, second), target), want)
    torch.testing.assert_close(
        loss(make(main, None, second), target), plain(main, target) + 0.4 * plain(second, target)
    )
    assert torch.equal(loss(make(main, None, None), target), plain(main, target))
    assert torch.equal(loss((main,), target), plain(main, target))


@pytest.mark.parametrize(
    ("output", "target", "options", "message"),
    [
        ({"out": scores(2, 5)}, classes(2), {}, "the model gave dict"),
        ((None, scores(2, 5)), classes(2), {}, "the model gave NoneType"),
        (scores(4, 5), classes(3), {}, r"scores are \(4, 5\), targets \(3,\)"),
        (scores(4, 5), classes(4) + 1, {}, r"Target 5 is out of bounds"),
        (scores(4, 5), classes(4).int(), {}, r"targets \(4,\) of torch.int32"),
        (scores(2, 6, 5), classes(2, 6), {}, r"loss.classes_dim=1\)"),
        (scores(2, 6, 5), classes(2, 7), {"classes_dim": -1}, r"targets must be \(2, 6\)"),
        (scores(2, 6, 5), classes(6, 2), {"classes_dim": -1}, r"targets must be \(2, 6\)"),
        (scores(2, 6, 5), classes(2, 6), {"classes_dim": 5}, r"loss.classes_dim=5\)"),
    ],
)
def test_says_in_one_line_what_does_not_go_together(output: Any, target: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^loss: [^\n]*{message}[^\n]*$"):
        CrossEntropy(**options)(output, target)


def test_smoothing_out_of_range() -> None:
    with pytest.raises(UserError, match=r"label_smoothing=1\.5"):
        CrossEntropy(label_smoothing=1.5)


@pytest.mark.parametrize(
    ("model", "dim", "weight"),
    [("lenet", 1, 0.3), ("googlenet", 1, 0.3), ("inception_v3", 1, 0.4), ("transformer_lm", -1, 0.3)],
)
def test_the_model_s_config_says_what_the_loss_must_know(model: str, dim: int, weight: float) -> None:
    loss = build(compose("train", [f"model={model}", "dataset=synthetic"]).loss)
    assert isinstance(loss, CrossEntropy)
    assert (loss.classes_dim, loss.auxiliary_weight) == (dim, weight)


def test_any_other_loss() -> None:
    config = compose("train", ["loss=other", "loss._target_=torch.nn.MultiMarginLoss", "+loss.p=2"])
    assert build(config.loss).p == 2


@pytest.mark.parametrize(
    ("output", "target", "right"),
    [
        ([[1.0, 2, 0], [3, 0, 0]], [1, 1], [1.0, 0.0]),
        ([[[0.0, 1], [1, 0], [1, 0], [1, 0]]], [[1, 1, 0, 0]], [0.75]),  # (rows, positions, classes)
        ([[[0.0, 1, 1, 1], [1, 0, 0, 0]]], [[1, 1, 0, 0]], [0.75]),  # (rows, classes, positions)
    ],
)
def test_accuracy_finds_the_classes(output: list[Any], target: list[Any], right: list[float]) -> None:
    found = accuracy(torch.tensor(output), torch.tensor(target))
    assert found.tolist() == right
    assert accuracy((torch.tensor(output), None), torch.tensor(target)).tolist() == right


@pytest.mark.parametrize(("output", "target"), [((4, 5), (4, 5)), ((4, 5), (3,)), ((4, 5, 6), (4, 7)), ((4,), (4,))])
def test_accuracy_of_what_does_not_go_together(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^metric: accuracy takes scores [^\n]*$"):
        accuracy(torch.zeros(output), torch.zeros(target, dtype=torch.int64))
