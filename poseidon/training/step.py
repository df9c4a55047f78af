"""One training step of one rank: micro-batches forward and backward, then the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.errors import UserError
from poseidon.training.loader import Batch

if TYPE_CHECKING:
    from poseidon.api import Session


def autocast(precision: str, device: torch.device) -> Callable[[], Any]:
    """Context of forward and loss: bf16 is autocast, parameters stay fp32."""
    if precision == "bf16":
        return partial(torch.autocast, device.type, dtype=torch.bfloat16)
    return nullcontext


class Stepper:
    """Steps a distributed model, so that the result is that of the whole global batch in one piece.

    Call after ``session.distribute``.

    Args:
        clip_own: each rank's own gradients are clipped, before the step (comm=downpour, whose step takes them away).
        plain_mean: gradients are averaged with equal weights (PyTorch's DDP and FSDP), not by rows: then this weighs
            the loss, and a rank without rows repeats an old batch with weight 0 rather than leave the others
            waiting.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        clip_norm: float | None = None,
        autocast: Callable[[], Any] = nullcontext,
        plain_mean: bool = False,
        clip_own: bool = False,
    ) -> None:
        self._session, self._model, self._optimizer, self._loss = session, model, optimizer, loss
        self._autocast = autocast
        self._plain_mean = plain_mean
        self._spare: Batch | None = None
        self._clip = Clip(list(model.parameters()), clip_norm) if clip_norm is not None else None
        self._clip_own = clip_own
        if self._clip is not None and not clip_own:
            # Within step(), after the engine's own pre-hook: only there has a rank without rows, which ran
            # no backward, the global gradients too. Clipping before would make the replicas differ.
            optimizer.register_step_pre_hook(self._clip)

    def step(self, batches: list[Batch], global_rows: int) -> tuple[Tensor, int]:
        """Trains on the micro-batches of this rank; [] if it has none.

        Args:
            global_rows: rows of all ranks in this step.

        Returns:
            (sum of the loss over this rank's rows, on the device and detached; rows)
        """
        session = self._session
        rows = sum(batch.rows for batch in batches)
        total = torch.zeros((), device=session.device)
        session.rows(rows)
        self._optimizer.zero_grad(set_to_none=True)
        weights = [batch.rows / rows for batch in batches]
        if self._plain_mean:
            batches, weights = self._reweighted(batches, global_rows)
        for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            with nullcontext() if i == len(batches) - 1 else session.no_sync():
                loss = self._forward(batch)
                (loss if weight == 1 else loss * weight).backward()
            if rows:
                total += loss.detach().sum() * batch.rows
        if self._clip is not None and self._clip_own:
            self._clip()
        self._optimizer.step()
        return total, rows

    def _reweighted(self, batches: list[Batch], global_rows: int) -> tuple[list[Batch], list[float]]:
        if batches:
            self._spare = batches[-1]
        elif self._spare is not None:
            return [self._spare], [0.0]
        else:
            raise UserError(
                f"comm=ddp and fsdp need a row on every rank in the first step, but it has {global_rows} rows for "
                f"{self._session.world_size} ranks: use fewer nodes, more data, or another comm"
            )
        return batches, [batch.rows * self._session.world_size / global_rows for batch in batches]

    def _forward(self, batch: Batch) -> Tensor:
        inputs, target = batch.data
        with self._autocast():
            loss = self._loss(self._model(inputs), target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"loss: returned {found}, must be one number, the mean over the rows")
        return loss


class Clip:
    """Optimizer pre-step hook: scales all gradients so that their common norm is at most ``norm``."""

    def __init__(self, parameters: list[nn.Parameter], norm: float) -> None:
        self._parameters, self._norm = parameters, norm

    def __call__(self, *_: object) -> None:
        nn.utils.clip_grad_norm_(self._parameters, self._norm)
