"""Batch-norm with the statistics of all ranks' rows together, on CPU as on CUDA: what one process computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from poseidon.engine.backward import Hook
from poseidon.errors import PoseidonError, UserError

log = logging.getLogger("poseidon")

_CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


def sync_batchnorm(model: nn.Module) -> nn.Module:
    """Let every batch-norm of `model` take its training statistics over the rows of all ranks, in place.

    One collective of 2 C + 1 numbers per layer and direction, in torch's default process group. Every rank must call
    the same layers equally often, in the same order. Parameters, buffers, hooks and state_dict keys stay; torch's own
    ``nn.SyncBatchNorm``, which refuses the CPU and weighs ranks equally, is replaced as well.

    In a distributed model a rank's loss counts for its n_r rows, as everywhere; before, for the first dimension of the
    layer's input. Of a sum that is differentiated on the way (a gradient penalty) it does not: give ranks equal rows.

    Returns:
        `model` itself.

    Raises:
        UserError: a lazy layer that has not seen data yet.
    """
    for name, module in model.named_modules():
        if isinstance(module, _LAZY):
            raise UserError(f"batch-norm {name or '(root)'} has no shape yet: run one forward pass before this call")
        if type(module) in _CONVERTIBLE:
            module.__class__ = SyncBatchNorm
        elif isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            kind = type(module).__name__
            log.warning("batch-norm %s is a %s, not one of torch's: its statistics stay local", name, kind)
    return model


#: -> (n_r of the present pass or None, has the user said so?)
Rows = Callable[[], tuple[int | None, bool]]


def weigh(model: nn.Module, rows: Rows | None) -> None:
    """Let every synchronised batch-norm of `model` ask `rows` for n_r; None: no longer."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.n_r = Hook() if rows is None else Hook(rows)


class SyncBatchNorm(_BatchNorm):
    """Batch-norm over (rows, C, ...) whose training statistics are of all ranks. See :func:`sync_batchnorm`.

    Differentiable twice. Ranks may have different numbers of rows, also none, and different further dimensions.

    Raises:
        PoseidonError: the other ranks' statistics do not come.
    """

    #: A hook, since copies of the layer must forget it.
    n_r: Hook = Hook()

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, var, count = _combined(_Gather.apply(_own(x), _Weight(self.n_r, len(x))))
        self._track(mean.detach(), var.detach() * count / (count - 1).clamp(min=1))
        shape = (-1, *(1,) * (x.dim() - 2))
        scale = torch.rsqrt(var + self.eps).to(x.dtype)
        if self.weight is not None:
            scale = scale * self.weight
        out = (x - mean.to(x.dtype).view(shape)) * scale.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_((1 - share) * running.double() + share * new)


def _own(x: torch.Tensor) -> torch.Tensor:
    """This rank's mean, sum of squared deviations and count per channel: (2 C + 1,), float64."""
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.size(1)
    if count:
        var, mean = torch.var_mean(x, dims, correction=0)
    else:
        var = mean = x.sum(dims)  # zeros that backward reaches: the other ranks wait for this one there
    return torch.cat([mean.double(), var.double() * count, var.new_full((1,), count, dtype=torch.float64)])


def _combined(ranks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean (C,), biased variance (C,) and count () of all ranks together, of every rank's own (P, 2 C + 1)."""
    means, squares = ranks[:, :-1].chunk(2, dim=1)
    counts = ranks[:, -1:].detach()
    total = counts.sum().clamp(min=1)
    mean = (means * counts).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


class _Weight:
    """n_r of a forward pass, or what session.rows() says before its backward pass."""

    def __init__(self, n_r: Hook, leading: int) -> None:
        self._n_r = n_r
        known, _ = n_r() or (None, False)
        self._rows: int = leading if known is None else known

    def now(self) -> int:
        said, explicit = self._n_r() or (None, False)
        return said if explicit and said is not None else self._rows


class _Gather(torch.autograd.Function):
    """(k,) of each rank -> (P, k) on every rank.

    A rank's loss counts n_r / N in the global one, so a gradient that comes from rank q's loss weighs n_q / n_r in
    terms of the local one of rank r. Gather and scatter are each other's adjoint under this weighting.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, weight: _Weight) -> torch.Tensor:
        ctx.weight = weight
        out = own.new_empty(dist.get_world_size(), *own.shape)
        _collective(lambda: dist.all_gather(list(out), own.contiguous()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Scatter.apply(grads[0], ctx.weight), None


class _Scatter(torch.autograd.Function):
    """(P, k) of each rank q, weighing n_q -> (k,): rank r's row, summed over q, in terms of n_r."""

    @staticmethod
    def forward(ctx: Any, ranks: torch.Tensor, weight: _Weight) -> torch.Tensor:
        ctx.weight, rows = weight, weight.now()
        total = ranks * rows
        _collective(lambda: dist.all_reduce(total))
        return total[dist.get_rank()] / max(rows, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Gather.apply(grads[0], ctx.weight), None


def _collective(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise PoseidonError(
            f"synchronised batch-norm: the other ranks' statistics did not come ({str(error).splitlines()[0]}); every "
            "rank must call the same layers equally often, and keep every output in its loss"
        ) from error
