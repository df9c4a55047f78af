"""What one rank does in chosen iterations, as spans in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Row(Enum):
    """Where a span stands, from top to bottom."""

    iteration = "iteration"
    device = "device"  # layers, reconstruction, optimizer step
    wait = "wait"  # of the training thread, for averages of others
    copy_out = "copy to host"
    copy_in = "copy to device"
    send = "send"  # a message is handed to the transport, which queues it
    receive = "receive"  # a message has come, and is taken care of
    aggregate = "aggregate"  # a server's sums
    collective = "collective"  # PyTorch's own: from its call until its result is there


@dataclass(frozen=True)
class About:
    """What a span is about.

    Attributes:
        layer: path of the module, as in ``named_modules()``; of several, the one with most parameters.
        more: other things to be known of it.
    """

    name: str = ""
    layer: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """``start``, ``end``: seconds of ``time.monotonic()``, dilated if the run is; equal clocks on one host."""

    row: Row
    name: str
    start: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)


class Tracer:
    """Keeps spans between :meth:`begin` and :meth:`end`; from any thread.

    Attributes:
        kinds: class of each layer, by path; spans tell it.
        recording: is anything kept now?
        computed: when the device's newest work ended, as far as it is known.
    """

    def __init__(self, kinds: Mapping[str, str] | None = None) -> None:
        self.events: list[Event] = []
        self.kinds = dict(kinds or {})
        self.computed = 0.0
        self.recording = False
        self._iteration = (0, 0.0)  # number, when it began
        self._local = threading.local()

    def begin(self, number: int) -> None:
        """An iteration that is to be kept begins."""
        self._iteration, self.recording = (number, time.monotonic()), True

    def end(self, *, goes_on: bool = False) -> None:
        """It ends; ``goes_on``: the next one is to be kept too, and so is what happens between them."""
        number, start = self._iteration
        self.span(Row.iteration, About(f"iteration {number}", more={"iteration": number}), start, time.monotonic())
        self.recording = goes_on

    def span(self, row: Row, about: About, start: float, end: float, **more: Any) -> None:
        if row is Row.device:
            self.computed = end
        if not self.recording:
            return
        details = {"layer": about.layer, "kind": self.kinds.get(about.layer, "")} if about.layer else {}
        self.events.append(Event(row, about.name or row.value, start, end, {**details, **about.more, **more}))

    @property
    def about(self) -> About:
        """What this thread is at, as far as it has been told."""
        return getattr(self._local, "about", About())

    @contextmanager
    def at(self, about: About) -> Iterator[None]:
        """Inside, this thread is at that."""
        before, self._local.about = self.about, about
        try:
            yield
        finally:
            self._local.about = before
