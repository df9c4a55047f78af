"""What of the ranks' output reaches the terminal, and when.

Lines are shown as they come, with two exceptions. A traceback is held back until it is known whether its
rank failed first (shown) or only because of another (not shown: it is in the log file). A line on stderr
that another rank has said a moment ago is held back too, for all ranks tend to fail with the same words.
If the rank simply goes on, what was held is shown after a few seconds, in order.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

from poseidon.cluster.base import LAUNCHER, OnLine

_TRACEBACK = ("Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):")
_REMEMBERED = 256  # lines of stderr that an echo is recognised by
_MOST_HELD = 10_000  # lines


def print_line(rank: int, stream: str, text: str) -> None:
    """The default terminal: rank's lines with a prefix, stdout to stdout, everything else to stderr."""
    out = sys.stdout if stream == "stdout" else sys.stderr
    line = f"[rank {rank}] {text}\n" if rank != LAUNCHER else f"{text}\n"
    # Whoever read us may be gone (`poseidon train | head`), or the stream closed: the run goes on.
    with contextlib.suppress(OSError, ValueError):
        try:
            out.write(line)
        except UnicodeEncodeError:
            encoding = out.encoding or "ascii"
            out.write(line.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()


@dataclass
class _Held:
    since: float
    lines: list[str] = field(default_factory=list)


@dataclass
class _Rank:
    held: _Held | None = None
    trouble: float | None = None
    in_traceback: bool = False
    exception: str = ""
    last: str = ""


class Screen:
    """Holds back and shows lines; also remembers each rank's last words.

    Args:
        hold: seconds after which what was held is shown if the rank goes on running.

    Attributes:
        ending: the job is on its way out: whatever has been said once need not be said again, however
            much later a slow rank gets to say it.
    """

    def __init__(self, on_line: OnLine | None, hold: float) -> None:
        self._on_line = on_line or print_line
        self._hold = hold
        self.ending = False
        self._ranks: dict[int, _Rank] = {}
        self._said: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._on_line(LAUNCHER, "launcher", text)

    def line(self, rank: int, stream: str, text: str, now: float) -> None:
        """A line of a rank."""
        if stream != "stderr":
            self._on_line(rank, stream, text)
            return
        state = self._ranks.setdefault(rank, _Rank())
        starts_traceback = text.startswith(_TRACEBACK)
        self._listen(state, text, starts_traceback)
        if starts_traceback and state.trouble is None:
            state.trouble = now
        if state.held is None and (starts_traceback or self._is_echo(rank, text, now)):
            state.held = _Held(now)
        if state.held is None:
            self._show(rank, text, now)
            return
        state.held.lines.append(text)
        if len(state.held.lines) > _MOST_HELD:
            self.release(rank, now)

    def trouble(self, rank: int) -> float | None:
        """When the traceback began that the rank has not lived down so far."""
        state = self._ranks.get(rank)
        return state.trouble if state else None

    def last_words(self, rank: int) -> str:
        """The exception that ended the rank, or else its last line on stderr."""
        state = self._ranks.get(rank)
        return (state.exception or state.last) if state else ""

    def tick(self, running: list[int], now: float) -> None:
        """Show what has been held too long from ranks that are still running: they lived it down."""
        if self.ending:
            return
        for rank in running:
            state = self._ranks.get(rank)
            if state and state.held and now - state.held.since >= self._hold:
                self.release(rank, now)
                state.trouble, state.exception = None, ""

    def release(self, rank: int, now: float) -> None:
        """Show what is held of a rank."""
        for text in self._take(rank):
            self._show(rank, text, now)

    def release_failed(self, rank: int, now: float) -> None:
        """Show what is held of the rank that failed first, save what another rank has said already."""
        whole = self.trouble(rank) is not None
        for text in self._take(rank):
            if whole or not self._is_echo(rank, text, now):
                self._show(rank, text, now)

    def _take(self, rank: int) -> list[str]:
        state = self._ranks.get(rank)
        if state is None or state.held is None:
            return []
        lines, state.held = state.held.lines, None
        return lines

    def _show(self, rank: int, text: str, now: float) -> None:
        self._said[text] = (rank, now)
        self._said.move_to_end(text)
        if len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)
        self._on_line(rank, "stderr", text)

    def _is_echo(self, rank: int, text: str, now: float) -> bool:
        who, when = self._said.get(text, (rank, now))
        return who != rank and (self.ending or now - when < self._hold) and bool(text.strip())

    @staticmethod
    def _listen(state: _Rank, text: str, starts_traceback: bool) -> None:
        if starts_traceback:
            state.in_traceback = True
        elif state.in_traceback and text and not text[0].isspace():
            state.exception, state.in_traceback = text.strip(), False
        if text.strip():
            state.last = text.strip()
