"""Rates of a host from published times of one node."""

from __future__ import annotations

import pytest
import torch

from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.emulation import fit as fitting
from poseidon.emulation.fit import P17_ONE_NODE, Rates, fit, one_node
from poseidon.emulation.layers import LayerTime, layer_times, step_bytes, trace


def layer(name: str, numbers: int, forward: float, backward: float, rows: int | None = None) -> LayerTime:
    return LayerTime(
        name, "Linear" if rows else "Conv2d", (name,), rows, None, 0, 0, forward=forward, backward=backward
    )


SHAPES = {"conv": (250,), "fc": (50, 100)}
TIMES = [layer("conv", 250, 1.0, 2.0), layer("fc", 5000, 0.5, 1.0, rows=2)]


def test_by_hand():
    rates = Rates(host_copy=10_000.0, server_sum=5_000.0)
    ps = 4.5 + 2 * 21_000 / 10_000 + 21_000 / 5_000
    assert one_node("ps", TIMES, 0.25, SHAPES, rates) == pytest.approx(ps + 0.25)
    # fc is final at 2.5: up until 4.5, added up until 8.5, down until 10.5; conv at 4.5: up 4.6, summed 8.7, down 10.6
    assert one_node("wfbp", TIMES, 0.25, SHAPES, rates) == pytest.approx(10.6 + 0.25)
    # fc's factors are 2 x 150 floats: up at 2.62; conv: up 4.6, summed 4.8, down 4.9
    assert one_node("poseidon", TIMES, 0.25, SHAPES, rates) == pytest.approx(4.9 + 0.25)


def test_rates_come_back_from_the_times_they_make():
    rates = Rates(host_copy=7_000.0 * 1e6, server_sum=3_000.0 * 1e6)
    shapes = {name: (*shape[:-1], shape[-1] * 1_000_000) for name, shape in SHAPES.items()}
    points = {system: one_node(system, TIMES, 0.0, shapes, rates) for system in ("ps", "wfbp")}
    found = fit(TIMES, 0.0, shapes, points)
    assert found.seconds == pytest.approx(points, rel=1e-4)
    assert found.rates.host_copy == pytest.approx(rates.host_copy, rel=3e-2)
    assert found.rates.server_sum == pytest.approx(rates.server_sum, rel=3e-2)


def test_titan_x_has_the_rates_that_fit_the_paper_s_points_of_one_node():
    """Three points and two rates: they agree within 1.1 %."""
    config = compose("plan", ["hardware=titan_x", "model=vgg19_22k"])
    with torch.device("meta"):
        model = build(config.model, key="model").train()
        calls = trace(model, torch.empty(32, 3, 224, 224))
    touched = step_bytes(lambda params: build(config.optimizer, params), model.parameters())
    assert touched == 20 * 229_052_817
    times, step = layer_times(calls, config.hardware, "vgg19_22k", 32, step_bytes=touched)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    rates = Rates(config.hardware.host_copy, config.hardware.server_sum)
    seconds = {system: one_node(system, times, step, shapes, rates) for system in P17_ONE_NODE}
    assert seconds == pytest.approx(P17_ONE_NODE, rel=0.011)
    found = fit(times, step, shapes, P17_ONE_NODE)
    assert (rates.host_copy, rates.server_sum) == pytest.approx(
        (found.rates.host_copy, found.rates.server_sum), rel=1e-3
    )


@pytest.mark.slow
def test_it_prints_what_is_missed(capsys: pytest.CaptureFixture[str]):
    fitting.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("host_copy 9.789e+09 bytes/s")
    assert len(printed) == 4
