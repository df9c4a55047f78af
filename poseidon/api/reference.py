"""What PyTorch's own ways to synchronise a model have in common under our interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn


class Reference(ABC):
    """One model under PyTorch's DDP or FSDP.

    Attributes:
        bytes: that a node sends per iteration; computed, as PyTorch does not tell.
    """

    bytes: float = 0.0

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
