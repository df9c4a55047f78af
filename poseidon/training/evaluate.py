"""Evaluation split over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from poseidon.errors import UserError
from poseidon.training.loader import Batch, collate, make_loader, to_device

if TYPE_CHECKING:
    from poseidon.api import Session


@dataclass(frozen=True)
class Score:
    """Means over all rows of the evaluation set; the same on every rank."""

    accuracy: float
    loss: float
    rows: int


class Evaluator:
    """Means of loss and metric over a dataset, every rank doing every world_size-th row.

    Sums are exact sums of float64 and added in rank order, so that all ranks decide alike (target_accuracy).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        size: int,
        loss: Callable[[Any, Any], Tensor],
        metric: Callable[[Any, Any], Tensor],
        session: Session,
        *,
        batch_size: int = 256,
        workers: int = 0,
        autocast: Callable[[], Any] = nullcontext,
    ) -> None:
        self._loss, self._metric = loss, metric
        self._session = session
        self._autocast = autocast
        mine = range(session.rank, size, session.world_size)
        batches = [list(mine[i : i + batch_size]) for i in range(0, len(mine), batch_size)]
        self._loader = make_loader(dataset, batches, _one_batch, workers, session.device)
        self._forked: Iterator[Any] | None = None

    def fork(self) -> None:
        """Starts the data-loading workers (if any); see :meth:`EpochLoader.fork`."""
        if self._loader.num_workers and len(self._loader):
            self._forked = iter(self._loader)

    def run(self, model: nn.Module) -> Score:
        """Collective. Buffers that training writes are made those of rank 0 first."""
        self._session.synchronize()
        mode = model.training
        model.eval()
        sums = [0.0, 0.0, 0]
        steps, self._forked = self._forked or iter(self._loader), None
        with torch.no_grad():
            for batch in steps:
                for i, value in enumerate(self._sums(model, batch)):
                    sums[i] += value
        model.train(mode)
        metric, loss, rows = (sum(column) for column in zip(*self._session.gather(sums), strict=True))
        return Score(metric / rows, loss / rows, rows)

    def _sums(self, model: nn.Module, batch: Batch) -> tuple[float, float, int]:
        inputs, target = to_device(batch.data, self._session.device)
        with self._autocast():
            output = model(inputs)
            loss = self._loss(output, target)
        values = self._metric(output, target)
        if values.shape != (batch.rows,):
            raise UserError(
                f"metric: returned a tensor of shape {tuple(values.shape)} for {batch.rows} rows; "
                "it must return one value per row"
            )
        return values.double().sum().item(), loss.double().item() * batch.rows, batch.rows


def _one_batch(samples: list[Any]) -> Batch:
    return collate(samples, 1)[0]
