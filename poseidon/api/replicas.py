"""Whether all ranks have the same model, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poseidon.errors import ReplicaMismatchError


def compare_replicas(gather: Callable[[Any], list[Any]], model: nn.Module, *, distributed: bool = True) -> None:
    """Collective.

    Args:
        gather: gives every rank's value.
        distributed: whether the model is a session's, so that replicas should be alike.

    Raises:
        ReplicaMismatchError: on every rank, naming the first tensor of ``state_dict()`` that differs.
    """
    why = (
        "something outside the engine changed it on one rank only, or this is a bug: please report it"
        if distributed
        else "this model was not given to session.distribute()"
    )
    mine = [[name, _digest(tensor)] for name, tensor in model.state_dict().items()]
    for column in zip(*gather(mine), strict=False):
        odd = [rank for rank, entry in enumerate(column) if entry != column[0]]
        if odd:
            raise ReplicaMismatchError(f"replicas differ: {column[0][0]} of rank {odd[0]} is not that of rank 0; {why}")


def _digest(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
