"""What a user's own script calls: ``init()``, :class:`Session`, ``session.distribute(model, optimizer)``."""

from poseidon.api.session import Session, init

__all__ = ["Session", "init"]
