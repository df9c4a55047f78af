"""What stands in an engine's place: PyTorch's own ways to synchronise a model, and comm=downpour."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn


class Reference(ABC):
    """One model that is synchronised otherwise than by an engine.

    Attributes:
        bytes: that a node sends per iteration; computed, as PyTorch does not tell.
        stall_seconds: that the training thread has waited; 0 where nobody sees it.
    """

    bytes: float = 0.0
    stall_seconds: float = 0.0

    def rows(self, n: int) -> None:  # noqa: B027  # most need not know
        """n_r of the next step."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Inside, backward passes only accumulate."""

    def sync_buffers(self, model: nn.Module) -> None:
        """Collective: rank 0's buffers."""
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def synchronize(self, model: nn.Module) -> None:
        """Collective: then a rank alone may evaluate or save until the next step."""
        self.sync_buffers(model)

    def whole(self) -> AbstractContextManager[None]:
        """Collective: inside, the model's parameters are whole."""
        return nullcontext()

    @abstractmethod
    def undo(self) -> None:
        """Collective: the model is plain again."""

    def close(self) -> None:
        """As far as that goes without other ranks."""
        self.undo()
