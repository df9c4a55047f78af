"""Calls of layers, and their times: together the profile's iteration, whatever the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.config.hardware import (
    HardwareConfig,
    IterationConfig,
    LayerSeconds,
    LayerTable,
    Trust,
)
from poseidon.config.paths import conf_dir
from poseidon.emulation.layers import LayerTime, layer_times, step_bytes, trace
from poseidon.engine.parameters import tensors_in, trainable
from poseidon.errors import UserError

MODELS = sorted(file.stem for file in (conf_dir() / "model").glob("*.yaml"))
SGD = 20.0  # bytes per parameter


def made(name: str, rows: int = 4, *overrides: str) -> tuple[nn.Module, torch.Tensor]:
    """A model of conf/ and a batch for it, on the meta device."""
    named = ["model.name=vit_b_16"] if name == "torchvision" else []
    config = compose("plan", [f"model={name}", *named, *overrides])
    dtype = getattr(torch, config.dataset.get("dtype") or "float32")
    with torch.device("meta"):
        return build(config.model, key="model").train(), torch.zeros(rows, *config.dataset["shape"], dtype=dtype)


def profile(**entries: Any) -> HardwareConfig:
    return HardwareConfig(name="box", memory_bandwidth=1e12, **entries)


def total(times: list[LayerTime]) -> float:
    return sum(time.forward + time.backward for time in times)


@pytest.mark.parametrize("name", MODELS)
def test_the_times_of_every_model_are_the_iteration_s(name: str):
    model, rows = made(name)
    calls = trace(model, rows)
    trained = [info.name for info in trainable(model)[1]]
    assert {p for call in calls for p in call.params} == set(trained)
    box = profile(iterations={"m": IterationConfig(batch_size=4, seconds=0.5)}, flops=1e12, flops_batchnorm=5e11)
    bytes_ = SGD * sum(p.numel() for p in model.parameters())
    times, step = layer_times(calls, box, "m", 4, step_bytes=bytes_)
    assert step == bytes_ / 1e12
    assert total(times) + step == pytest.approx(0.5, rel=1e-9)
    assert min(min(time.forward, time.backward) for time in times) >= 0
    by_flops, _ = layer_times(calls, box, "another", 4)
    rate = 5e11 if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) else 1e12
    assert total(by_flops) == pytest.approx(counted(model, rows) / rate, rel=1e-9)


def counted(model: nn.Module, rows: torch.Tensor) -> float:
    """FLOPs of an iteration, as PyTorch counts them; only its count of grouped convolutions is another one."""
    with FlopCounterMode(display=False) as counter:
        outputs = tensors_in(model(rows))
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    if any(isinstance(module, nn.Conv2d) and module.groups > 1 for module in model.modules()):
        return sum(call.forward_flops + call.backward_flops for call in trace(model, rows))
    return counter.get_total_flops()


def test_calls_are_in_the_order_of_the_forward_pass():
    layers = [call.layer for call in trace(*made("alexnet"))]
    assert layers == ["conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8"]


def test_k_is_what_each_linear_layer_sees():
    fc = {call.layer: call.rows for call in trace(*made("vgg19_22k", 32)) if call.kind == "Linear"}
    assert fc == {"classifier.0": 32, "classifier.3": 32, "classifier.6": 32}
    calls = trace(*made("transformer_lm", 4))
    assert {call.rows for call in calls if call.kind == "Linear"} == {4 * 64}
    assert [call.indices for call in calls if call.kind == "Embedding"] == [4 * 64]


def test_a_shared_weight_is_in_every_call_that_uses_it():
    calls = trace(*made("transformer_lm"))
    assert [call.layer for call in calls if "tokens.weight" in call.params] == ["tokens", "head"]
    assert [call.layer for call in calls][:2] == ["tokens", ""]  # the positions are the model's own
    assert calls[1].params == ("positions",)


def test_the_first_layer_makes_no_gradient_of_its_input():
    first, second, *_ = trace(*made("vgg19"))
    assert first.backward_flops == first.forward_flops
    assert second.backward_flops == 2 * second.forward_flops


def test_auxiliary_heads_are_called_where_they_branch_off():
    layers = [call.layer for call in trace(*made("googlenet"))]
    assert layers.index("aux1.fc1") < layers.index("inception4b.branch1.conv") < layers.index("aux2.fc2")


def test_convolutions_in_groups_count_only_what_they_multiply():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ConvTranspose2d(8, 4, 2))
        calls = trace(model, torch.zeros(2, 8, 6, 6))
    one, two, three = calls
    assert two.forward_flops == 2 * 2 * 8 * 9 * 16
    assert two.backward_flops == 2 * two.forward_flops
    assert three.forward_flops == 2 * 2 * 16 * 8 * 4 * 4
    assert three.backward_flops == 2 * three.forward_flops
    assert one.backward_flops == one.forward_flops


class Several(nn.Module):
    """A layer called three times, attention whose output layer is never called itself, and one layer left out."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for _ in range(3):
            x = self.same(x).relu()
        x = self.frozen(self.attention(x, x, x, need_weights=False)[0])
        return {"scores": [x * self.scale], "again": self.same(x)}


def test_several_calls_attention_and_what_is_not_used():
    with torch.device("meta"):
        model = Several().train()
        calls = trace(model, torch.zeros(2, 5, 8))
    assert [call.layer for call in calls] == ["same", "same", "same", "attention", "", "same"]
    assert set(calls[3].params) == {name for name, _ in model.named_parameters() if name.startswith("attention.")}
    assert calls[0].params == ("same.weight", "same.bias")
    assert [call.rows for call in calls] == [10, 10, 10, None, None, 10]
    flops = [call.backward_flops / call.forward_flops for call in calls if call.layer == "same"]
    assert flops == [1, 2, 2, 2]  # the first makes no gradient of the input
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_compute_twice(reentrant: bool):
    with torch.device("meta"):
        calls = trace(Checkpointed(reentrant).train(), torch.zeros(4, 8))
    assert [call.layer for call in calls] == ["first", "inner.0", "inner.1", "last"]
    assert calls[1].params == ("inner.0.weight", "inner.0.bias")
    product = calls[0].forward_flops
    again = 2 if reentrant else 1  # the other kind stops as soon as it has what was asked for
    assert sum(call.backward_flops for call in calls) == (1 + 3 * 2 + again) * product


def test_it_works_with_real_numbers_too_and_keeps_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    before = [p.grad for p in model.parameters()]
    assert len(trace(model, torch.ones(2, 4))) == 2
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_a_measured_table_says_each_layer_s_share():
    model, rows = made("lenet")
    calls = trace(model, rows)
    seconds = {call.layer: LayerSeconds(0.001 * i, 0.002 * i) for i, call in enumerate(calls, 1)}
    table = LayerTable(batch_size=4, seconds=seconds)
    alone, _ = layer_times(calls, profile(layers={"lenet": table}), "lenet", 8)
    assert [(time.forward, time.backward) for time in alone] == [
        (pytest.approx(0.002 * i), pytest.approx(0.004 * i)) for i in range(1, 5)
    ]
    box = profile(layers={"lenet": table}, iterations={"lenet": IterationConfig(batch_size=4, seconds=0.06)})
    scaled, _ = layer_times(calls, box, "lenet", 4)
    assert total(scaled) == pytest.approx(0.06)
    assert scaled[3].forward == pytest.approx(0.008)
    del seconds["ip2"]
    with pytest.raises(UserError, match=r"hardware\.layers\.lenet\.seconds: there is no layer ip2"):
        layer_times(calls, box, "lenet", 4)


def test_the_calls_of_one_layer_share_its_measured_time():
    with torch.device("meta"):
        calls = trace(Several().train(), torch.zeros(2, 5, 8))
    table = LayerTable(seconds={name: LayerSeconds(4.0, 7.0) for name in ("same", "attention", "")})
    times, _ = layer_times(calls, profile(layers={"m": table}), "m", 1)
    assert [time.forward for time in times] == pytest.approx([1, 1, 1, 4, 4, 1])
    assert [time.backward for time in times] == pytest.approx([1, 2, 2, 7, 7, 2])


def test_time_grows_with_the_rows_but_not_the_step_s():
    calls = trace(*made("lenet"))
    box = profile(iterations={"lenet": IterationConfig(batch_size=32, seconds=1.0, trust=Trust.published, source="X")})
    times, step = layer_times(calls, box, "lenet", 64, step_bytes=0.2e12)
    assert (total(times), step) == (pytest.approx(1.6), 0.2)
    with pytest.raises(UserError, match=r"^hardware\.memory_bandwidth=1e\+12: the optimizer step alone .* 2 s"):
        layer_times(calls, box, "lenet", 64, step_bytes=2e12)


def test_layers_without_a_formula_share_the_time_evenly():
    with torch.device("meta"):
        calls = trace(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)).train(), torch.zeros(2, 4))
    times, _ = layer_times(calls, profile(iterations={"m": IterationConfig(seconds=0.6)}), "m", 1)
    assert [(time.forward, time.backward) for time in times] == [(pytest.approx(0.1), pytest.approx(0.2))] * 2


@pytest.mark.parametrize(
    ("model", "entries", "missing"),
    [
        ("lenet", {"flops_batchnorm": 1e12}, "nor hardware.flops;"),
        ("resnet50", {"flops": 1e12}, "nor hardware.flops_batchnorm;"),
        ("lenet", {"flops": 1e12, "iterations": {"lenet": None}}, "no hardware.iterations.lenet; add"),
    ],
)
def test_a_profile_that_does_not_know_a_model_says_what_to_add(model: str, entries: dict[str, Any], missing: str):
    calls = trace(*made(model))
    with pytest.raises(UserError, match=rf"^hardware=box has no time for model {model}: .*poseidon profile") as error:
        layer_times(calls, profile(**entries), model, 4)
    assert missing in str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "per_parameter"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 20),
        (torch.optim.SGD, {"lr": 0.1}, 12),
        (torch.optim.Adam, {"lr": 0.1}, 28),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, 36),
        (torch.optim.RMSprop, {"lr": 0.1}, 20),
        (torch.optim.LBFGS, {}, 20),  # not to be tried: it wants a closure
    ],
)
def test_the_step_touches_the_optimizer_s_states(kind: Any, options: dict[str, Any], per_parameter: float):
    model = nn.Linear(30, 10)
    model.bias.requires_grad_(False)
    assert step_bytes(lambda params: kind(params, **options), model.parameters()) == per_parameter * 300
