"""Ctrl-C and friends while a job runs: noted here, acted on by the job's loop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C may reach us twice (from the terminal and from a wrapper that forwards it): not an "at once".
_SAME = 0.2  # seconds


class Interrupts:
    """Context manager that collects the signals that ask us to end.

    Outside the main thread, where Python allows no handlers, it collects nothing. A signal that was being
    ignored (nohup, background jobs of scripts) stays ignored.

    Attributes:
        received: (signal, monotonic seconds) of each.
    """

    def __init__(self) -> None:
        self.received: list[tuple[signal.Signals, float]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received or now - self.received[-1][1] >= _SAME:
            self.received.append((signal.Signals(number), now))
