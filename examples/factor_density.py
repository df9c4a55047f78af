"""How sparse are a network's sufficient factors? Trains it in one process and counts what is not zero.

    OMP_NUM_THREADS=1 python examples/factor_density.py alexnet --shape 3 227 227 --rows 32 --iterations 200

prints, at the start, in the middle and at the end, each linear layer's share of non-zeros in u, the gradient of its
output, and v, its input, and the mean over all iterations as ``model.density`` (conf/model/alexnet.yaml) has it.
"""

import argparse
from collections import defaultdict

import torch
from torch import nn

from poseidon.data import glyphs
from poseidon.models import alexnet, torchvision_model

BUILD = {
    "alexnet": lambda shape, classes: alexnet(shape, classes),
    "vgg19": lambda shape, classes: torchvision_model("vgg19", classes, shape),
}

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=BUILD)
parser.add_argument("--shape", type=int, nargs=3, default=[3, 224, 224])
parser.add_argument("--classes", type=int, default=20)
parser.add_argument("--rows", type=int, default=32)
parser.add_argument("--iterations", type=int, default=200)
parser.add_argument("--images", type=int, default=640)
parser.add_argument("--lr", type=float, default=1e-4)
args = parser.parse_args()

torch.manual_seed(0)
model = BUILD[args.model](args.shape, args.classes).train()
optimizer = torch.optim.Adam(model.parameters(), args.lr)
train, _ = glyphs(args.shape, args.classes, args.images, args.classes)
found: dict[str, dict[str, float]] = defaultdict(dict)


def share(values: torch.Tensor) -> float:
    return torch.count_nonzero(values).item() / values.numel()


def watch(name: str, layer: nn.Linear) -> None:
    def seen(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        found[name]["v"] = share(inputs[0])
        output.register_hook(lambda grad: found[name].update(u=share(grad)))

    layer.register_forward_hook(seen)


layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
for name in layers:
    watch(name, model.get_submodule(name))
history = []
for _ in range(args.iterations):
    picked = torch.randint(args.images, (args.rows,))
    x, y = (torch.stack(columns) for columns in zip(*(train[int(i)] for i in picked), strict=True))
    optimizer.zero_grad()
    output = model(x)
    loss = nn.functional.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
    right = (output.argmax(1) == y).float().mean().item()
    history.append((loss.item(), right, {name: dict(found[name]) for name in layers}))

part = max(1, args.iterations // 8)
for what, first in (("start", 0), ("middle", (args.iterations - part) // 2), ("end", args.iterations - part)):
    some = history[first : first + part]
    loss, right = (sum(each[i] for each in some) / part for i in (0, 1))
    print(f"{what:7} iterations {first} to {first + part - 1}: loss {loss:.3f}, {right:.0%} right", end="")
    for name in layers:
        u, v = (sum(each[2][name][factor] for each in some) / part for factor in "uv")
        print(f" | {name} u {u:.2f} v {v:.2f}", end="")
    print(flush=True)
for name in layers:
    u, v = (sum(each[2][name][factor] for each in history) / len(history) for factor in "uv")
    print(f"  {name}: {{u: {u:.2f}, v: {v:.2f}}}")
