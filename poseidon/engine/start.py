"""Agreement at start: the same model everywhere, or the same error everywhere."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from poseidon.engine.exchange import Exchange
from poseidon.errors import UserError
from poseidon.schemes import raw

log = logging.getLogger("poseidon")

TAG_MANIFEST = 1
TAG_VERDICT = 2
TAG_SEEN = 3
TAG_PLAN = 4
TAG_RECORDED = 8


def manifest(
    model: nn.Module,
    options: dict[str, Any],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    buffers: Sequence[tuple[str, torch.Tensor]] | None = None,
) -> list[list[str]]:
    """What must be equal on all ranks: [what, value] in the model's order.

    Args:
        buffers: those that must be, by name, if not all.
    """
    rows = [[f"option {key}", repr(value)] for key, value in options.items()]
    rows.append(["torch", torch.__version__.split("+")[0]])
    rows.append(["device of the parameters", " ".join(sorted({p.device.type for p in model.parameters()}))])
    for name, p in model.named_parameters():
        rows.append(
            [
                f"parameter {name}",
                f"{list(p.shape)} {p.dtype} stride {list(p.stride())} requires_grad={p.requires_grad}",
            ]
        )
    for name, b in model.named_buffers() if buffers is None else buffers:
        rows.append([f"buffer {name}", f"{list(b.shape)} {b.dtype}"])
    names = {id(p): name for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        rows.append([f"optimizer {number}", type(optimizer).__name__])
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {index}"
            rows.append([where, _settings(group)])
            rows.append([f"{where}, parameters", " ".join(names.get(id(p), "(another's)") for p in group["params"])])
    return rows


def _settings(group: dict[str, Any]) -> str:
    """A parameter group's numbers and words; rates may be tensors."""
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in sorted(group.items())}
    return ", ".join(f"{key}={value!r}" for key, value in plain.items() if isinstance(value, (int, float, str, tuple)))


def agree(exchange: Exchange, model_index: int, mine: list[list[str]], where: torch.device) -> None:
    """Compare manifests with rank 0's.

    Args:
        where: the device whose arithmetic is compared, too.

    Raises:
        UserError: they differ; on every rank the same message, naming the first difference and both values.
    """
    probe = _probe(where)
    if exchange.rank == 0:
        verdict = ""
        odd = []
        for peer in range(1, exchange.world_size):
            theirs, its_probe = json.loads(exchange.hear(peer, model_index, TAG_MANIFEST, "description of its model"))
            verdict = verdict or _difference(mine, theirs, peer)
            odd += [str(peer)] if its_probe != probe else []
        if odd:
            log.warning(
                "ranks %s compute other bits than rank 0 (another processor or library): replicas may drift apart in "
                "the last bits; what is compared at the end then differs",
                ", ".join(odd),
            )
        for peer in range(1, exchange.world_size):
            exchange.say(peer, model_index, TAG_VERDICT, verdict)
    else:
        exchange.say(0, model_index, TAG_MANIFEST, json.dumps([mine, probe]))
        verdict = exchange.hear(0, model_index, TAG_VERDICT, "verdict on the models")
    if verdict:
        raise UserError(verdict)


def _probe(where: torch.device) -> str:
    """Digest of a product and an optimizer step: equal on hardware and libraries that round alike."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(96, 160, generator=generator).to(where))
    with torch.enable_grad():
        (torch.randn(33, 160, generator=generator).to(where) @ weight.t()).square().sum().backward()
    torch.optim.Adam([weight], lr=0.01).step()
    return digest([("weight", weight)])


def _difference(mine: list[list[str]], theirs: list[list[str]], rank: int) -> str:
    for (what, value), (their_what, their_value) in zip(mine, theirs, strict=False):
        if (what, value) != (their_what, their_value):
            return f"ranks differ: {what} {value} on rank 0, but {their_what} {their_value} on rank {rank}"
    if len(mine) != len(theirs):
        longer, where = (mine, 0) if len(mine) > len(theirs) else (theirs, rank)
        what = longer[min(len(mine), len(theirs))][0]
        return f"ranks differ: {what} exists only on rank {where} of ranks 0 and {rank}"
    return ""


def digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 over names, shapes, types and values."""
    total = hashlib.sha256()
    for name, tensor in named:
        total.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        total.update(raw(tensor.detach().cpu().contiguous().view(-1)))
    return total.hexdigest()
