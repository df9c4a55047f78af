"""Rates of a host's copies and sums, fitted to published times of one node.

    python -m poseidon.emulation.fit      # conf/hardware/titan_x.yaml, from P17's VGG19-22K

One node that is worker and server alone still copies its gradients to the host, adds them up there, and copies the
result back: that is what it is slower by than the bare model. Three systems hide it differently:

* ``ps``: all three one after the other when the backward pass is over (Caffe+PS);
* ``wfbp``: layer by layer while the backward pass goes on; what cannot hide is left. Each way has a copy engine, and
  the sums a CPU, which take the layers in their order;
* ``poseidon``: the same, but of linear layers only the factors, K x (M + N), are copied, and to the host only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, prod

import torch

from poseidon.emulation.layers import LayerTime

FLOAT = 4  # bytes

#: P17, VGG19-22K on one node, 40 GbE: seconds per iteration.
P17_ONE_NODE = {"ps": 1.725, "wfbp": 0.970, "poseidon": 0.935}


@dataclass(frozen=True)
class Job:
    """What one layer's synchronisation needs: bytes to the host, to be added up, and to the device."""

    up: float
    summed: float
    down: float


@dataclass(frozen=True)
class Rates:
    """bytes/s, as in a hardware profile."""

    host_copy: float
    server_sum: float


@dataclass(frozen=True)
class Fit:
    """Fitted rates, and what the systems' iterations take with them, in seconds."""

    rates: Rates
    seconds: dict[str, float]


def one_node(
    system: str, times: Sequence[LayerTime], step: float, shapes: Mapping[str, Sequence[int]], rates: Rates
) -> float:
    """Seconds of one iteration of a single node.

    Args:
        system: ``ps``, ``wfbp`` or ``poseidon``.
        times: of the layers' calls, in the order of the forward pass; each parameter is in one of them only.
        step: seconds of the optimizer step, which waits for all.
        shapes: of the parameters, fp32.
    """
    forward = sum(time.forward for time in times)
    jobs = [_job(time, shapes, factors=system == "poseidon" and time.rows is not None) for time in reversed(times)]
    if system == "ps":
        after = sum(_seconds(job, rates) for job in jobs)
        return forward + sum(time.backward for time in times) + after + step
    now, up, added, down = forward, 0.0, 0.0, 0.0
    for time, job in zip(reversed(times), jobs, strict=True):
        now += time.backward
        up = max(up, now) + job.up / rates.host_copy
        if job.summed:
            added = max(added, up) + job.summed / rates.server_sum
            down = max(down, added) + job.down / rates.host_copy
    return max(now, up, down) + step


def fit(
    times: Sequence[LayerTime], step: float, shapes: Mapping[str, Sequence[int]], points: Mapping[str, float]
) -> Fit:
    """The rates with the least squares of what they miss the points by.

    Args:
        points: seconds by system; see :func:`one_node` for the other arguments.
    """

    def seconds(rates: Rates) -> dict[str, float]:
        return {system: one_node(system, times, step, shapes, rates) for system in points}

    def error(rates: Rates) -> float:
        found = seconds(rates)
        return sum((found[system] - points[system]) ** 2 for system in points)

    best = _least(error)
    return Fit(best, seconds(best))


def _least(error: Callable[[Rates], float], lowest: float = 1e8, highest: float = 1e12) -> Rates:
    """By grids of 17 x 17 rates, each about the best one of the last and a quarter as wide."""
    width = log(highest / lowest)
    best = Rates(exp(log(lowest) + width / 2), exp(log(lowest) + width / 2))
    while width > 1e-4:
        factors = [exp(width * (i / 16 - 0.5)) for i in range(17)]
        grid = [Rates(best.host_copy * c, best.server_sum * s) for c in factors for s in factors]
        best = min(grid, key=error)
        width /= 4
    return best


def _job(time: LayerTime, shapes: Mapping[str, Sequence[int]], *, factors: bool) -> Job:
    """The bias of a layer that sends factors can be had from them: the gradient of its output, summed over the rows."""
    if factors:
        assert time.rows is not None
        return Job(sum(FLOAT * time.rows * sum(shapes[n]) for n in time.params if len(shapes[n]) == 2), 0.0, 0.0)
    dense = sum(FLOAT * prod(shapes[name]) for name in time.params)
    return Job(dense, dense, dense)


def _seconds(job: Job, rates: Rates) -> float:
    return (job.up + job.down) / rates.host_copy + job.summed / rates.server_sum


def main() -> None:
    """Fits ``titan_x`` and prints the rates and what they miss the published points by."""
    from poseidon.config.build import build
    from poseidon.config.compose import compose
    from poseidon.emulation.layers import layer_times, step_bytes, trace

    config = compose("plan", ["hardware=titan_x", "model=vgg19_22k", "dataset=synthetic", "trainer.batch_size=32"])
    with torch.device("meta"):
        model = build(config.model, key="model").train()
        calls = trace(model, torch.empty(config.trainer.batch_size, *config.dataset["shape"]))
    touched = step_bytes(lambda params: build(config.optimizer, params), model.parameters())
    times, step = layer_times(calls, config.hardware, "vgg19_22k", config.trainer.batch_size, step_bytes=touched)
    found = fit(times, step, {name: p.shape for name, p in model.named_parameters()}, P17_ONE_NODE)
    print(f"host_copy {found.rates.host_copy:.4g} bytes/s each way, server_sum {found.rates.server_sum:.4g} bytes/s")
    for system, published in P17_ONE_NODE.items():
        seconds = found.seconds[system]
        print(f"{system:10} published {published:.3f} s, fitted {seconds:.3f} s, {seconds / published - 1:+.1%}")


if __name__ == "__main__":
    main()
