"""Batches of this rank, cut into micro-batches, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from poseidon import data
from poseidon.config.shares import cut
from poseidon.data.sampler import GlobalBatchSampler, derive_seed
from poseidon.errors import UserError


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch; ``data`` is the collated (input, target)."""

    rows: int
    data: Any


def collate(samples: Sequence[Any], parts: int) -> list[Batch]:
    """Samples of one step as at most ``parts`` micro-batches, none of them empty; [] without samples."""
    pieces = (cut(len(samples), part, [1] * parts) for part in range(parts))
    return [Batch(len(piece), data.collate(samples[piece.start : piece.stop])) for piece in pieces if piece]


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors anywhere inside tuples, lists and dicts, moved; pinned ones without waiting."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device) for value in data)
    return data


def rows_of(dataset: Any, key: str) -> int:
    """Length of a map-style dataset, or a UserError naming the config key."""
    try:
        size = len(dataset)
    except TypeError:
        raise UserError(
            f"{key}: {type(dataset).__name__} has no length; give a map-style dataset (__len__, __getitem__)"
        ) from None
    if size < 1:
        raise UserError(f"{key}: {type(dataset).__name__} has no rows")
    return size


class EpochLoader:
    """Steps of one rank, epoch after epoch, each a list of micro-batches on the device.

    Data-loading workers are forked once, by :meth:`fork`, before the engine has threads or sockets that a
    forked child could hold on to.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalBatchSampler,
        *,
        device: torch.device,
        micro_batches: int = 1,
        workers: int = 0,
    ) -> None:
        self.sampler = sampler
        self.device = device
        self._generator = torch.Generator()
        self._loader = make_loader(
            dataset, sampler, partial(collate, parts=micro_batches), workers, device, self._generator
        )
        self._forked: Iterator[list[Batch]] | None = None

    def fork(self, epoch: int, start_row: int = 0) -> None:
        """Starts the data-loading workers (if any) on what :meth:`epoch` will be asked for first."""
        if self._loader.num_workers:
            self._forked = self._begin(epoch, start_row)

    def epoch(self, epoch: int, start_row: int = 0) -> Iterator[list[Batch]]:
        """All steps of the epoch from ``start_row`` on; a step without rows of this rank is []."""
        steps, self._forked = self._forked or self._begin(epoch, start_row), None
        for batches in steps:
            yield [Batch(batch.rows, to_device(batch.data, self.device)) for batch in batches]

    def _begin(self, epoch: int, start_row: int) -> Iterator[list[Batch]]:
        self.sampler.set_epoch(epoch, start_row)
        # Of augmentations in data-loading workers: differ by rank and epoch, not from rerun to rerun.
        self._generator.manual_seed(derive_seed(self.sampler.seed, "workers", self.sampler.rank, epoch))
        return iter(self._loader)


def make_loader(
    dataset: Dataset[Any],
    batches: Any,
    collate_fn: Callable[[list[Any]], Any],
    workers: int,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """The one place where loaders are made, for training and evaluation alike."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate_fn,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        generator=generator,
    )
