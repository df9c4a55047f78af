"""What a user's own script calls: ``init()``, :class:`Session`, ``session.distribute(model, optimizer)``."""

from poseidon.api.batchnorm import SyncBatchNorm, sync_batchnorm
from poseidon.api.session import Session
from poseidon.api.start import init

__all__ = ["Session", "SyncBatchNorm", "init", "sync_batchnorm"]
