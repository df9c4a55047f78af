"""comm=fsdp: PyTorch's FSDP2 in real processes, and what it takes and refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.api.env import JobEnv
from poseidon.api.fsdp.shards import Optimizers
from poseidon.api.fsdp.units import check_shardable, units_of
from poseidon.errors import UserError
from tests.api.fsdp_cases import CASES, Encoder, LanguageModel, Odd
from tests.api.fsdp_uses import USES
from tests.api.test_processes import ROOT, run_script

SCRIPT = """
import poseidon
from tests.api import fsdp_cases, fsdp_uses

session = poseidon.init(timeout=60)
fsdp_cases.check_all(session)
fsdp_uses.check_all(session)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.timeout(180)
def test_equals_one_process_and_leaves_a_plain_model(tmp_path: Path, ranks: int) -> None:
    output, ok, reason = run_script(tmp_path, SCRIPT, ranks)
    assert ok, f"{reason}\n{output}"
    assert f"SAME {len(CASES)}" in output
    assert f"FINE {len(USES)}" in output


def test_pytorchs_part_is_imported_by_those_who_use_it() -> None:
    code = "import sys, poseidon.api.session; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def units(model: nn.Module, least_bytes: int = 1024) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in units_of(model, least_bytes)]


def test_units_are_neither_tiny_nor_large_where_they_can_be_split() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))  # 16,640 and 520 bytes
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), block)  # 896 and 64 bytes
    assert units(net, 0) == ["0", "1", "2.0", "2.1"]
    assert units(net, 600) == ["0", "2.0"]
    assert units(net, 1100) == ["2"]
    assert units(net, 2000) == []  # one unit, the root's
    assert units_of(net, 600, blocks=False) == [net[0], block[0]]
    assert units_of(net, 2000, blocks=False) == [block[0]]


def test_what_shares_or_reads_weights_is_one_unit() -> None:
    blocks = [f"blocks.{i}.{part}" for i in range(2) for part in ("q", "k", "v", "out", "up", "down")]
    assert units(LanguageModel().lm) == blocks
    assert units(LanguageModel(tied=False).lm) == ["tokens", *blocks, "head"]
    layers = [f"layers.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "linear1", "linear2")]
    assert units(Encoder()) == ["start", *layers, "layers", "end"]  # its norms together
    assert units(Encoder(), 4096) == ["layers.layers.0", "layers.layers.1"]
    assert units(Odd()) == ["start", "twice", "read", "unused", "frozen", "end"]


def test_a_module_with_two_parents_is_no_part_of_one_units() -> None:
    shared = nn.Linear(64, 64)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 64), shared) for _ in range(2)))
    assert units(net, 2000) == ["0.0", "0.1", "1.0", "1.1"]


def wrong(change: Callable[[nn.Sequential], object]) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return change(model) or model  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.append(nn.Embedding(4, 8, sparse=True)), "layer 2 gives sparse gradients.*drop sparse=True"),
        (lambda m: m.append(nn.LazyLinear(3)), "parameter 2.weight has no shape yet"),
        (lambda m: m.append(nn.LazyBatchNorm1d(affine=False)), "buffer 2.running_mean has no shape yet"),
        (
            lambda m: m.register_parameter("scale", nn.Parameter(torch.tensor(1.0))),
            "parameter scale is a single number",
        ),
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 8).t())), "parameter 0.weight is not contiguous"),
        (lambda m: m.append(nn.Linear(8, 8, dtype=torch.complex64)), "parameter 2.weight is complex.*comm='ddp'"),
        (lambda m: m.append(nn.Linear(8, 8, dtype=torch.bfloat16)), "0.weight has torch.float32 and 2.weight has"),
        (lambda m: m[1].weight.register_hook(print) and None, "parameter 1.weight has hooks"),
        (lambda m: torch.compile(m, backend="eager"), "the model is compiled: comm='fsdp' needs it as it was before"),
        (lambda m: m[0].compile(backend="eager"), "layer 0 is compiled"),
        (lambda m: torch.jit.script(m), "the model is a ScriptModule"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(change: Callable[[nn.Sequential], object], message: str) -> None:
    model = wrong(change)
    with pytest.raises(UserError, match=message):
        check_shardable(model, [])


def test_optimizers_that_cannot_step_rows_are_refused() -> None:
    model = nn.Linear(8, 8)
    for name in ("LBFGS", "Rprop", "Adafactor", "SparseAdam"):
        with pytest.raises(UserError, match=f"PyTorch's {name} cannot step sharded parameters"):
            Optimizers([getattr(torch.optim, name)(model.parameters(), lr=0.1)], model)
    Optimizers([torch.optim.Adam(model.parameters(), fused=True)], model)
    with pytest.raises(UserError, match="SGD cannot step sharded parameters with fused=True"):
        Optimizers([torch.optim.SGD(model.parameters(), fused=True)], model)


def test_an_optimizers_state_that_has_no_rows_is_refused() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state[model.weight].update(step=torch.tensor(1.0), average=torch.zeros(8, 8), word="mine")
    Optimizers([optimizer], model)
    for value, what in ((torch.ones(3), "of shape [3]"), ([torch.ones(3)], "list")):
        optimizer.state[model.weight]["factor"] = value
        with pytest.raises(UserError, match=re.escape(f"cannot cut Adam's state factor ({what}) of weight into rows")):
            Optimizers([optimizer], model)


def test_alone_nothing_is_installed() -> None:
    session = Session(JobEnv(), torch.device("cpu"), timeout=10)
    model = nn.Linear(4, 4)
    hooks = re.findall("hooks", str([k for k, v in vars(model).items() if v]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert session.distribute(model, optimizer, comm="fsdp") is model
    assert type(model) is nn.Linear
    assert re.findall("hooks", str([k for k, v in vars(model).items() if v])) == hooks
    assert session.report(model)["schemes"] == {"(root)": "none"}
    session.synchronize()
    session.undistribute(model)
