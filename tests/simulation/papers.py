"""Networks of the papers as the arithmetic of ideal times takes them: seconds shared out by FLOPs, a backward pass of
twice the forward pass, factors multiplied at 5 TFLOP/s, hosts that copy and add up in no time."""

from __future__ import annotations

from math import prod

from poseidon.planning import FactorSize, Param
from poseidon.simulation import Job, Layer

FLOPS = 5e12  # of a Titan X, in a product of factors

Shapes = list[tuple[tuple[int, ...], int]]  # of a weight, and the positions that it is applied to

_ALEXNET: Shapes = [
    ((96, 3, 11, 11), 55**2),
    ((256, 48, 5, 5), 27**2),
    ((384, 256, 3, 3), 13**2),
    ((384, 192, 3, 3), 13**2),
    ((256, 192, 3, 3), 13**2),
    *(((m, n), 1) for m, n in ((4096, 9216), (4096, 4096), (1000, 4096))),
]
_VGG19: Shapes = [
    ((m, n, 3, 3), side**2)
    for side, widths in (
        (224, [(64, 3), (64, 64)]),
        (112, [(128, 64), (128, 128)]),
        (56, [(256, 128)] + 3 * [(256, 256)]),
        (28, [(512, 256)] + 3 * [(512, 512)]),
        (14, 4 * [(512, 512)]),
    )
    for m, n in widths
]


def alexnet() -> Job:
    return job(_ALEXNET, 256, 0.25)


def vgg19_22k() -> Job:
    return job([*_VGG19, ((4096, 25088), 1), ((4096, 4096), 1), ((21841, 4096), 1)], 32, 0.925)


def job(shapes: Shapes, rows: int, seconds: float) -> Job:
    """
    Args:
        rows: K of each machine.
        seconds: of an iteration of one machine.
    """
    flops = [2.0 * rows * prod(shape) * positions for shape, positions in shapes]
    layers, params, factors = [], [], {}
    for i, ((shape, _), work) in enumerate(zip(shapes, flops, strict=True)):
        name, linear = f"layer{i}", len(shape) == 2
        forward = seconds / 3 * work / sum(flops)
        product = work / FLOPS if linear else 0.0
        layers.append(Layer(name, (f"{name}.weight", f"{name}.bias"), forward, 2 * forward, product))
        params.append(param(f"{name}.weight", shape, linear))
        params.append(param(f"{name}.bias", shape[:1]))
        if linear:
            factors[f"{name}.weight"] = FactorSize(rows, 4)
    return Job(tuple(layers), tuple(params), factors)


def param(name: str, shape: tuple[int, ...], linear: bool = False) -> Param:
    layer = name.rpartition(".")[0]
    return Param(name, layer, "", shape, "float32", 4, "linear" if linear else None)
