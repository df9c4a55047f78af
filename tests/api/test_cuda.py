"""Two ranks on GPUs, where there are some; the same scripts on the CPU in any case, so that they are known to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.api.cuda_cases import CASES, COMMS, NARROW
from tests.api.test_processes import run_script

gpu = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU, which both ranks share")
gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, one for each rank")

SYNCHRONISED = """
import copy
import torch
from torch import nn
import poseidon

session = poseidon.init(timeout=60, device={device!r} if {device!r} == "cpu" else None)
torch.manual_seed(0)
base = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
alone = copy.deepcopy(base).to(session.device)
model = nn.SyncBatchNorm.convert_sync_batchnorm(base) if {of_torch} else poseidon.sync_batchnorm(base)
model.to(session.device)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
session.distribute(model, optimizers[0], comm="ddp")
generator = torch.Generator().manual_seed(1)
for step in range(3):
    x = torch.randn(8, 3, 8, 8, generator=generator).to(session.device)
    mine = x[4 * session.rank : 4 * session.rank + 4]
    for each, rows, optimizer in ((model, mine, optimizers[0]), (alone, x, optimizers[1])):
        optimizer.zero_grad()
        each(rows).square().mean(1).mean().backward()
        optimizer.step()
    for ours, theirs in zip((*model.parameters(), *model.buffers()), (*alone.parameters(), *alone.buffers())):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
digests = session.gather(session.digest(model))
assert digests[0] == digests[1], digests
if session.rank == 0:
    print("SAME on", session.device.type, flush=True)
session.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("device", "of_torch"),
    [("cpu", False), pytest.param("cuda", False, marks=gpus), pytest.param("cuda", True, marks=gpus)],
)
def test_synchronised_batch_norm_equals_one_process(tmp_path: Path, device: str, of_torch: bool) -> None:
    output, ok, reason = run_script(tmp_path, SYNCHRONISED.format(device=device, of_torch=of_torch))
    assert ok, f"{reason}\n{output}"
    assert f"SAME on {device}" in output


OURS = """
import poseidon
from tests.api import cuda_cases

session = poseidon.init(timeout=60, device={device!r})
cuda_cases.check_all(session)
session.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=gpu), pytest.param("cuda", marks=gpus)])
def test_our_own_comms_equal_one_process(tmp_path: Path, device: str) -> None:
    """Also that nothing waits for the device in a step, where there is one."""
    output, ok, reason = run_script(tmp_path, OURS.format(device=device))
    assert ok, f"{reason}\n{output}"
    assert f"SAME {len(COMMS) * len({**CASES, **NARROW})} on {device.partition(':')[0]}" in output


BACKEND = """
import torch.distributed as dist
import poseidon

session = poseidon.init(timeout=60, device={device!r})
print("BY", dist.get_backend(), flush=True)
session.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), pytest.param("cuda:0", "gloo", marks=gpu), pytest.param("cuda", "nccl", marks=gpus)],
)
def test_ranks_on_one_gpu_take_gloo(tmp_path: Path, device: str, backend: str) -> None:
    output, ok, reason = run_script(tmp_path, BACKEND.format(device=device))
    assert ok, f"{reason}\n{output}"
    assert output.count(f"BY {backend}") == 2
