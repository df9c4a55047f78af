"""The library call in real processes: beside PyTorch's DDP, over real sockets, and when a rank dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from poseidon.cluster import launch_job
from poseidon.config.schema import ClusterConfig

ROOT = Path(__file__).parents[2]

BESIDE_DDP = """
import torch
from torch.nn import functional as F
import poseidon
from tests.engine.nets import assert_exact, batch, build, grads, sgd, share

session = poseidon.init(timeout=60)
out = {}
for name in ("mlp", "lenet", "batchnorm"):
    runs = {}
    for comm in ("ddp", "ps", "sfb", "hybrid"):
        for overlap in ("none", "backward") if comm != "ddp" else ("backward",):
            model = build(name)
            optimizer = sgd(model)
            session.distribute(model, optimizer, comm=comm, overlap=overlap)
            seen = []
            for step in range(3):
                x, y = share(batch(step, 12), session.rank, [6, 6])
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                seen.append(grads(model))
                optimizer.step()
            session.synchronize()
            runs[comm, overlap] = seen, [b.clone() for b in model.buffers()], session.digest(model)
            session.undistribute(model)
    want, buffers, _ = runs.pop(("ddp", "backward"))
    for (comm, overlap), (got, mine, digest) in runs.items():
        for a, b in zip(got, want):
            assert_exact(a, b)
        for a, b in zip(mine, buffers):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        out[f"{name} {comm} {overlap}"] = digest
    for comm in ("ps", "sfb", "hybrid"):
        assert runs[comm, "none"][2] == runs[comm, "backward"][2], (name, comm)
digests = session.gather(out)
assert digests[0] == digests[1], digests
if session.rank == 0:
    print("SAME", len(out), flush=True)
session.close()
"""


def run_script(tmp_path: Path, script: str, world_size: int = 2) -> tuple[str, bool, str]:
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    lines: list[str] = []
    result = launch_job(
        [sys.executable, str(tmp_path / "script.py")],
        ClusterConfig(nodes=world_size),
        world_size,
        tmp_path / "logs",
        env={"PYTHONPATH": str(ROOT)},
        on_line=lambda rank, stream, text: lines.append(text),
    )
    return "\n".join(lines), result.ok, result.reason


@pytest.mark.timeout(180)
def test_gradients_and_buffers_equal_ddps(tmp_path: Path) -> None:
    output, ok, reason = run_script(tmp_path, BESIDE_DDP)
    assert ok, f"{reason}\n{output}"
    assert "SAME 18" in output


ENDLESS = """
import torch
from torch import nn
import poseidon

session = poseidon.init(timeout=60)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.distribute(model, optimizer, comm="hybrid")
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    if step == 3:
        print("going", flush=True)
"""


@pytest.mark.timeout(90)
def test_without_a_launcher_survivors_name_the_killed_rank_within_15_seconds(tmp_path: Path) -> None:
    """As under torchrun or Slurm: nobody watches the processes but the ranks themselves."""
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        os.set_inheritable(server.fileno(), True)
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env=env
                | {"RANK": str(r), "LOCAL_RANK": str(r), "POSEIDON_STORE_FD": str(server.fileno() if r == 0 else -1)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                close_fds=False,
            )
            for r in range(3)
        ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
        ranks[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            _, errors = ranks[rank].communicate(timeout=15)
            assert ranks[rank].returncode == 1
            assert "PeerLostError: rank 1" in errors, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def test_importing_the_package_imports_none_of_the_heavy_ones() -> None:
    code = "import json, sys, poseidon; print(json.dumps([m for m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert not {"mlflow", "hydra", "matplotlib", "torch"} & set(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_example_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "examples/own_script.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", done.stdout)]
    assert len(accuracies) == 4
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.94
    assert "ranks have different numbers of rows" not in done.stderr
