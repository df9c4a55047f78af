"""Which rows each rank sees in each step of an epoch: global batches first, then ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from poseidon.config.shares import cut
from poseidon.errors import UserError


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts; unlike a sum, no two tuples collide by design."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class GlobalBatchSampler(Sampler[list[int]]):
    """Batch sampler of one rank. Yields one list of row indices per step, possibly an empty one.

    An epoch cuts the data, in an order that depends on ``seed`` and the epoch only, into global batches of
    ``world_size / devices * batch_size`` rows, and each of those by rank; the last, partial one too. So all ranks make
    the same number of steps, every row is seen exactly once per epoch, and one process with
    ``batch_size = world_size * K`` sees the global batches of ``world_size`` processes with K. With ``shares``,
    relative numbers of all nodes, those that are slower may have fewer rows of each. A node's rows are divided
    evenly among its ``devices``, successive ranks.

        sampler = GlobalBatchSampler(len(data), 32, rank=session.rank, world_size=session.world_size)
        for epoch in range(5):
            sampler.set_epoch(epoch)
            for indices in sampler:  # a rank without rows gets [] and calls session.rows(0), optimizer.step()
                ...

    PyTorch's default collate function cannot make a batch of an empty list: hand the loader one that can.

    Raises:
        UserError: no rows, or a batch size, rank or share out of range.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        shares: Sequence[float] | None = None,
        devices: int = 1,
    ) -> None:
        if size < 1:
            raise UserError("the training set has no rows")
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, must be at least 1")
        if not 0 <= rank < world_size:
            raise UserError(f"rank is {rank}, must be in 0..{world_size - 1}")
        if devices < 1 or world_size % devices:
            raise UserError(f"devices is {devices}, must divide the {world_size} ranks into nodes")
        nodes = world_size // devices
        shares = [1] * nodes if shares is None else shares
        if len(shares) != nodes or not all(0 <= share < math.inf for share in shares) or not any(shares):
            raise UserError(f"shares is {shares}, must be a number for each of the {nodes} nodes")
        self.size = size
        self.global_batch = nodes * batch_size
        self.rank = rank
        self.shares = [share for share in shares for _ in range(devices)]
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.start_row = 0

    def set_epoch(self, epoch: int, start_row: int = 0) -> None:
        """Next iteration yields this epoch, without its first ``start_row`` rows (0..size)."""
        self.epoch = epoch
        self.start_row = start_row

    def order(self) -> Sequence[int]:
        """Row indices of the whole epoch, the same on every rank."""
        if not self.shuffle:
            return range(self.size)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order

    def __len__(self) -> int:
        """Steps from ``start_row`` to the end of the epoch; the same on every rank."""
        return -(-(self.size - self.start_row) // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for first in range(self.start_row, self.size, self.global_batch):
            batch = order[first : first + self.global_batch]
            yield [batch[i] for i in cut(len(batch), self.rank, self.shares)]
