"""Is it faster than DDP here? Three copies of one network, trained in turn under ddp, ps and hybrid in one run:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/compare_comms.py

Machines drift, so only ratios between neighbouring blocks of iterations are compared.
"""

import os
import statistics
import time

import torch
from torch import nn

import poseidon
from poseidon.models import cifar10_quick, lenet, mlp

COMMS = ("ddp", "ps", "hybrid")
ROWS = int(os.environ.get("ROWS", "32"))  # per rank and iteration
BLOCKS, ITERATIONS, WARM_UP = 12, 25, 5
NETWORKS = {
    "lenet": (lambda: lenet((1, 28, 28), 10), (1, 28, 28)),
    "cifar10_quick": (lambda: cifar10_quick((3, 32, 32), 10), (3, 32, 32)),
    "wide mlp": (lambda: mlp((1, 28, 28), 10, (2048, 2048)), (1, 28, 28)),
}

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
session = poseidon.init(device="cpu")
for name, (build, shape) in NETWORKS.items():
    x, y = torch.randn(ROWS, *shape), torch.randint(0, 10, (ROWS,))
    copies = {}
    for comm in COMMS:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        copies[comm] = session.distribute(model, optimizer, comm=comm), optimizer
    medians: dict[str, list[float]] = {comm: [] for comm in COMMS}
    for _ in range(BLOCKS):
        for comm in COMMS:
            model, optimizer = copies[comm]
            seconds = []
            session.barrier()
            for _ in range(WARM_UP + ITERATIONS):
                start = time.perf_counter()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
            medians[comm].append(statistics.median(seconds[WARM_UP:]))
    if session.rank == 0:
        for comm in COMMS:
            ratios = sorted(ddp / mine for ddp, mine in zip(medians["ddp"], medians[comm], strict=True))
            speed = session.world_size * ROWS / statistics.median(medians[comm])
            print(
                f"{name:14} {comm:7} {speed:8,.0f} images/s  {statistics.median(ratios):.3f} x ddp "
                f"(quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f})",
                flush=True,
            )
    for model, _ in copies.values():
        session.undistribute(model)
