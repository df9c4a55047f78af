from __future__ import annotations

from typing import Any

import pytest
import torch

from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.errors import UserError
from tests.config.conftest import CUSTOM

HERE = __name__


def give(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def refuse(value: int = 0) -> None:
    raise ValueError("value\nis wrong")


def complain() -> None:
    raise UserError("the folder is empty")


def crash() -> None:
    raise RuntimeError("a bug")


def test_descriptors_are_not_arguments():
    node = {"_target_": f"{HERE}.give", "name": "n", "shape": [1], "num_classes": 2, "throughput_only": True, "x": 3}
    assert build(node, key="dataset") == ((), {"x": 3})
    assert build({**node, "_target_": f"{HERE}.give"}, key="model")[1].keys() == {
        "shape",
        "num_classes",
        "throughput_only",
        "x",
    }
    assert build({"_target_": f"{HERE}.give", "interval": "epoch", "y": 1}, key="schedule") == ((), {"y": 1})


def test_lists_are_lists_and_nested_nodes_are_built():
    node = {"_target_": f"{HERE}.give", "sizes": [1, [2]], "inner": {"_target_": f"{HERE}.give", "name": "kept"}}
    _, arguments = build(node, key="model")
    assert arguments == {"sizes": [1, [2]], "inner": ((), {"name": "kept"})}
    assert type(arguments["sizes"]) is list


def test_what_comes_first_is_passed_by_position():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = build(compose("train").optimizer, [weight])
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["params"][0] is weight


def test_partial_gives_the_function_with_arguments_filled_in():
    assert build({"_target_": f"{HERE}.give", "_partial_": True, "k": 2}, key="metric")(1) == ((1,), {"k": 2})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, r"model\._target_ is not set"),
        ({"_target_": "nowhere.Thing"}, r"model\._target_=nowhere\.Thing cannot be imported: .*nowhere"),
        ({"_target_": f"{HERE}.Thing"}, r"model\._target_=.*Thing cannot be imported"),
        ({"_target_": f"{HERE}.crash", "extra": 1}, "model: .*extra"),
        ({"_target_": f"{HERE}.refuse"}, r"model: .*value is wrong.*test_build\.py:\d+"),
        ({"_target_": f"{HERE}.complain"}, "^model: the folder is empty$"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(node, message):
    with pytest.raises(UserError, match=message) as caught:
        build(node, key="model")
    assert "\n" not in str(caught.value)


def test_a_bug_of_the_target_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug") as caught:
        build({"_target_": f"{HERE}.crash"}, key="model")
    assert caught.traceback[-1].name == "crash"
    assert any("while building model" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("choice", ["cosine", "step", "polynomial"])
def test_schedules_end_where_they_should(choice):
    config = compose("train", [f"schedule={choice}", "trainer.epochs=4"])
    optimizer = build(config.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    schedule = build(config.schedule, optimizer)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    expected = 0.02 * 0.01 if choice == "step" else 0.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-9)


def test_the_example_of_one_s_own_parts_learns(monkeypatch):
    monkeypatch.syspath_prepend(str(CUSTOM))
    config = compose("train", ["experiment=mine"], CUSTOM / "conf")
    torch.manual_seed(0)
    model = build(config.model)
    train, evaluation = build(config.dataset)
    loss, metric = build(config.loss), build(config.metric)
    optimizer = build(config.optimizer, model.parameters())
    x, y = (torch.stack(column) for column in zip(*(train[i] for i in range(len(train))), strict=True))
    first = loss(model(x), y).item()
    for _ in range(100):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
    assert value.item() < first / 3
    point, arm = evaluation[0]
    assert metric(model(point[None]), arm[None]).shape == (1,)
