"""Exceptions of the whole package. A user's mistake is a :class:`UserError`: one line, no traceback."""

from __future__ import annotations

#: Exit status of a process that ended only because another rank was lost; the launcher looks past it
#: for the rank that failed first.
PEER_LOST_EXIT = 75


class PoseidonError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(PoseidonError):
    """The user's mistake (configuration, arguments, data): printed as one line, without a traceback."""


class OutOfStepError(UserError):
    """Ranks make different numbers of backward passes or optimizer steps; raised on every rank."""

    #: How its message begins, by which the other ranks know it.
    BEGINNING = "ranks are out of step"


class PeerLostError(PoseidonError):
    """Another rank died, left or fell silent.

    Attributes:
        rank: the rank that was lost (not the one that raises).
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class ReplicaMismatchError(PoseidonError):
    """Replicas that must be bit-identical are not; names the first tensor that differs."""
