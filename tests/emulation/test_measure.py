"""`poseidon profile`: this machine's figures, written as a profile that a training can take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from poseidon import cli
from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.config.hardware import HardwareConfig, IterationConfig, LayerSeconds, LayerTable, Trust
from poseidon.config.profiles import read_profile, write_profile
from poseidon.emulation import measure
from poseidon.emulation.layers import layer_times, trace
from poseidon.errors import UserError
from poseidon.reporting.profile import render

FEW = ("profile.iterations=2", "profile.warmup=1", "trainer.batch_size=8")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "_LARGE", 1000)
    monkeypatch.chdir(tmp_path)


def test_each_layer_is_given_its_own_time(monkeypatch: pytest.MonkeyPatch):
    """On a clock that only the layers' arithmetic moves."""
    elapsed = 0.0

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, seconds):
            nonlocal elapsed
            elapsed += seconds
            ctx.seconds = seconds
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            nonlocal elapsed
            elapsed += 2 * ctx.seconds
            return grad, grad.sum().reshape(1), None

    class Layer(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(x, self.weight, self.seconds)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: elapsed)
    twice = Layer(3.0)
    model = nn.Sequential(Layer(1.0), nn.ReLU(), twice, twice)
    found = measure.layer_seconds(model, lambda: [model(torch.ones(2)).sum()], torch.device("cpu"), repeats=3)
    assert {path: (s.forward, s.backward) for path, s in found.items()} == {"0": (1.0, 2.0), "2": (6.0, 12.0)}


def test_an_iteration_is_timed_after_the_warmup():
    calls: list[int] = []
    seconds = measure.iteration_seconds(lambda: calls.append(1), torch.device("cpu"), warmup=2, repeats=3)
    assert (len(seconds), len(calls)) == (3, 5)
    assert min(seconds) >= 0


def test_rates_of_this_machine():
    assert measure.memory_bandwidth(torch.device("cpu")) > 0
    assert measure.server_sum() > 0
    assert measure.host_copy(torch.device("cpu")) is None  # a CPU's gradients are with the host already


@pytest.mark.parametrize("model", ["lenet", "mlp"])
def test_what_is_measured_can_be_emulated(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["profile", f"model={model}", "hardware=mine", *FEW]) == 0
    printed = capsys.readouterr().out
    assert f"use it: poseidon train --config-dir conf hardware=mine model={model} dataset=synthetic" in printed
    config = compose("train", ["hardware=mine", f"model={model}", "dataset=synthetic"], tmp_path / "conf")
    profile = config.hardware
    entry = profile.iterations[model]
    assert (profile.name, profile.trust, entry.trust, entry.batch_size) == ("mine", Trust.measured, Trust.measured, 8)
    assert torch.__version__.partition("+")[0] in entry.source
    assert "1 thread" in entry.source
    assert profile.host_copy is None
    with torch.device("meta"):
        built = build(config.model, key="model").train()
        calls = trace(built, torch.empty(8, *config.dataset["shape"]))
    times, step = layer_times(calls, profile, model, 8)
    assert sum(time.forward + time.backward for time in times) + step == pytest.approx(entry.seconds, rel=1e-9)
    table = profile.layers[model].seconds
    first, last = times[0], times[-1]
    measured = table[first.layer].forward / table[last.layer].backward
    assert first.forward / last.backward == pytest.approx(measured, rel=1e-6)
    assert [file.name for file in tmp_path.iterdir()] == ["conf"]


def test_one_profile_holds_several_models_of_one_machine(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["profile", "-m", "model=lenet,mlp", "hardware=mine", *FEW]) == 0
    assert set(read_profile(Path("conf/hardware/mine.yaml")).iterations) == {"lenet", "mlp"}
    assert cli.main(["profile", "model=mlp", "hardware=mine", "cluster.threads=2", *FEW]) == 2
    torch.set_num_threads(1)
    assert "was measured on another machine" in capsys.readouterr().err


def test_a_file_elsewhere_gives_the_name(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["profile", "model=mlp", "profile.output=deep/box.yaml", *FEW]) == 0
    assert read_profile(Path("deep/box.yaml")).name == "box"
    assert "put it into a folder hardware/" in capsys.readouterr().out


def test_an_experiment_s_hardware_is_not_this_machine_s(tmp_path: Path):
    (tmp_path / "my" / "experiment").mkdir(parents=True)
    (tmp_path / "my" / "experiment" / "own.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /hardware: titan_x\ntrainer: {batch_size: 4}\n"
    )
    few = ("profile.iterations=1", "profile.warmup=0", "model=mlp")
    assert cli.main(["profile", "--config-dir", "my", "experiment=own", "hardware=box", *few]) == 0
    profile = read_profile(tmp_path / "conf" / "hardware" / "box.yaml")
    assert list(profile.iterations) == ["mlp"]
    assert (profile.flops, profile.description) != (4.2e12, None)
    assert "Titan" not in str(profile.description)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hardware=a/b"], "hardware.name=a/b: must be the name of a file"),
        (["profile.iterations=0"], "profile.iterations=0: must be at least 1"),
        (["trainer.accumulate=2"], "trainer.accumulate=2: only iterations in one piece"),
        (["hardware=titan"], "conf/hardware/titan.yaml is a profile that nobody measured (trust: published)"),
        (["hardware=broken"], "conf/hardware/broken.yaml: is no hardware profile: "),
        (["profile.output=conf"], "is no hardware profile: "),
        (["profile.output=conf/hardware/titan.yaml/x.yaml"], "cannot"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]):
    write_profile(Path("conf/hardware/titan.yaml"), HardwareConfig(name="titan", trust=Trust.published))
    Path("conf/hardware/broken.yaml").write_text("name: [\n")
    before = Path("conf/hardware/titan.yaml").read_text()
    assert cli.main(["profile", "model=mlp", *FEW, *arguments]) == 2
    message = capfd.readouterr().err
    assert said in message
    assert message.count("\n") == 1
    assert Path("conf/hardware/titan.yaml").read_text() == before


def test_what_is_printed_is_short_and_doubts_a_busy_machine(tmp_path: Path):
    seconds = {f"layer{i}": LayerSeconds(0.001 * i, 0.002 * i) for i in range(40)}
    profile = HardwareConfig(
        iterations={"m": IterationConfig(batch_size=8, seconds=2.5)}, layers={"m": LayerTable(seconds=seconds)}
    )
    calm = render(profile, "m", [2.5, 2.5, 2.6], 5e9, tmp_path / "hardware" / "box.yaml")
    assert len(calm.splitlines()) < 25
    assert "(28 others)" in calm
    assert "2.500 s per iteration, median of 3 from 2.500 s to 2.600 s; 2 GFLOP/s" in calm
    assert "busy" not in calm
    assert "was the machine busy?" in render(profile, "m", [2.0, 2.5, 2.6], 5e9, tmp_path / "box.yaml")


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path):
    for name in ("titan_x", "k20"):
        profile = compose("train", [f"hardware={name}"]).hardware
        write_profile(tmp_path / f"{name}.yaml", profile)
        assert read_profile(tmp_path / f"{name}.yaml") == profile
    with pytest.raises(UserError, match="is no hardware profile"):
        read_profile(tmp_path / "absent.yaml")
