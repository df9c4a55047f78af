"""Which rank failed first, and the one line that says so. Pure: no processes here."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.errors import PEER_LOST_EXIT

USER_ERROR_EXIT = 2  # the rank has printed one line saying what the user should do
_LONGEST = 300  # characters of a rank's last words in a reason
_HINTS = {signal.SIGKILL: " (killed by hand, or for lack of memory)"}


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        status: exit code, or minus the signal's number.
        at: when its end was seen (seconds, monotonic).
        trouble: when its last traceback began, if it did not live it down.
        told: we had told it to end before it did.
        words: the exception it ended with, or its last line on stderr.
    """

    rank: int
    status: int
    at: float
    trouble: float | None = None
    told: bool = False
    words: str = ""

    @property
    def guilty(self) -> bool:
        """Whether it can be the cause: it failed, and neither by our hand nor because of another rank."""
        if self.status in (0, PEER_LOST_EXIT):
            return False
        return not self.told or self.trouble is not None

    @property
    def since(self) -> float:
        """When it failed: at the first line of a traceback, for a rank may take seconds to exit after it."""
        return self.at if self.trouble is None else min(self.at, self.trouble)


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """The rank that all others' ends follow from, or None if none of these can be the cause."""
    return min((e for e in ended if e.guilty), key=lambda e: (e.since, e.rank), default=None)


def describe(failure: Ended) -> str:
    """One line naming the rank and how it ended."""
    words = _shorten(failure.words)
    if failure.status == USER_ERROR_EXIT and words and failure.trouble is None:
        return f"rank {failure.rank} could not go on: {words}"
    if failure.told:
        return f"rank {failure.rank} failed and had to be ended: {words}"
    if failure.status < 0:
        return f"rank {failure.rank} was killed by {signal_name(-failure.status)}{_hint(-failure.status)}"
    return f"rank {failure.rank} failed with exit code {failure.status}" + (f": {words}" if words else "")


def describe_losses(ended: Sequence[Ended]) -> tuple[int | None, str]:
    """Rank and reason when no rank failed of itself: each says that it lost another.

    The one rank that had to be ended, if there is just one, is the rank that the others lost.
    """
    lost = min((e for e in ended if e.status == PEER_LOST_EXIT), key=lambda e: e.at, default=None)
    silent = [e for e in ended if e.told and e.status not in (0, PEER_LOST_EXIT)]
    suspect = silent[0].rank if len(silent) == 1 else None
    said = f"rank {lost.rank} said: {_shorten(lost.words) or 'another rank was lost'}" if lost else ""
    parts = [f"rank {suspect} did not end by itself" if suspect is not None else "", said]
    return suspect, "; ".join(part for part in parts if part) or "the ranks had to be ended"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(status: int) -> int:
    """A status as a shell gives it: 128 + the signal's number if one ended it. Never 0 for a failure."""
    return status if status > 0 else 128 - status if status < 0 else os.EX_SOFTWARE


def _hint(number: int) -> str:
    return next((text for known, text in _HINTS.items() if known == number), "")


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
