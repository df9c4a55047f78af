"""Poseidon: data-parallel training of PyTorch models that makes commodity Ethernet enough.

``poseidon.init()`` joins the job that a launcher (``poseidon train``, ``torchrun``) started and returns a
:class:`Session`; ``session.distribute(model, optimizer)`` hooks a plain model and optimizer in place.
Importing this package imports none of hydra, mlflow or matplotlib.
"""

from typing import TYPE_CHECKING, Any

from poseidon.errors import PeerLostError, PoseidonError, UserError

if TYPE_CHECKING:
    from poseidon.api import Session, SyncBatchNorm, init, sync_batchnorm

__version__ = "0.1.0"
__all__ = [
    "PeerLostError",
    "PoseidonError",
    "Session",
    "SyncBatchNorm",
    "UserError",
    "__version__",
    "init",
    "sync_batchnorm",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: only who calls the library pays for it, not `poseidon --help`.
    if name in ("Session", "SyncBatchNorm", "init", "sync_batchnorm"):
        from poseidon import api

        return getattr(api, name)
    raise AttributeError(f"module 'poseidon' has no attribute {name!r}")
