"""Output of one rank: bytes from its pipes, whole lines to its log file and to whoever shows them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

_CHUNK = 64 * 1024  # bytes per read: one rank's flood does not starve the others
_LONGEST = 64 * 1024  # bytes of a line; longer ones are shown in pieces
_REFRESH = 1.0  # seconds between shown states of a line that is redrawn with carriage returns
_STALE = 1.0  # seconds after which an unfinished line goes to the log file as it is
_DRAIN = 64  # chunks read from a pipe that an escaped process keeps filling
# A carriage return at the very end may be half of "\r\n": it waits for the next byte.
_END = re.compile(rb"\r?\n|\r(?=[^\n])")


class LineSplitter:
    """Cuts bytes into pieces that end in a line feed or a carriage return, terminator included."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def rest(self) -> bytes:
        """The unfinished line so far."""
        return bytes(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        quiet = b"\n" not in data and b"\r" not in data and self._rest[-1:] != b"\r"
        self._rest += data
        if quiet and len(self._rest) <= _LONGEST:  # no scan per byte of a line that dribbles in
            return []
        pieces, end = [], 0
        if not quiet:
            for match in _END.finditer(self._rest):
                pieces.append(bytes(self._rest[end : match.end()]))
                end = match.end()
        while len(self._rest) - end > _LONGEST:
            pieces.append(bytes(self._rest[end : end + _LONGEST]))
            end += _LONGEST
        del self._rest[:end]
        return pieces

    def finish(self) -> bytes:
        """The unfinished line, at the end of the stream."""
        rest = self.rest
        self._rest.clear()
        return rest


class Stream:
    """One of a rank's two streams: what came is logged byte for byte and shown line by line."""

    def __init__(self, log: Callable[[bytes], None], show: Callable[[str], None]) -> None:
        self._log = log
        self._show = show
        self._splitter = LineSplitter()
        self._logged = 0  # bytes of the unfinished line that are in the log already
        self._fed_at = 0.0
        self._redrawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> None:
        self._fed_at = now
        self._emit(self._splitter.feed(data), now)

    def finish(self, now: float) -> None:
        rest = self._splitter.finish()
        self._emit([rest] if rest else [], now)

    def tick(self, now: float) -> None:
        """Put an unfinished line that has been standing for a while into the log: a hang may follow it."""
        if now - self._fed_at >= _STALE:
            rest = self._splitter.rest
            if len(rest) > self._logged:
                self._log(rest[self._logged :])
                self._logged = len(rest)

    def _emit(self, pieces: list[bytes], now: float) -> None:
        if not pieces:
            return
        self._log(b"".join(pieces)[self._logged :])
        self._logged = 0
        for piece in pieces:
            text = piece.rstrip(b"\r\n").decode("utf-8", "replace")
            if piece.endswith(b"\r"):  # a progress bar: show it now and then
                if not text.strip() or now - self._redrawn_at < _REFRESH:
                    continue
                self._redrawn_at = now
            self._show(text)


class RankOutput:
    """Both streams of a rank and its log file.

    Args:
        fds: non-blocking descriptors by stream name; not closed here.
        show: called with stream name and line.
        complain: called once, with one line, if the log file cannot be written; the job goes on.
    """

    def __init__(
        self,
        fds: Mapping[str, int],
        log: Path,
        show: Callable[[str, str], None],
        complain: Callable[[str], None],
    ) -> None:
        self.open = dict(fds)
        self._path = log
        self._complain: Callable[[str], None] | None = complain
        self._file = log.open("wb", buffering=0)
        self._streams = {name: Stream(self._write, partial(show, name)) for name in fds}

    def read(self, name: str, now: float) -> bool:
        """Take in what stream ``name`` has, up to one chunk; False when there is nothing (more)."""
        try:
            data = os.read(self.open[name], _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._streams[name].feed(data, now)
            return True
        del self.open[name]
        self._streams[name].finish(now)
        return False

    def tick(self, now: float) -> None:
        for stream in self._streams.values():
            stream.tick(now)

    def finish(self, now: float) -> None:
        """Take in what is still in the pipes, without waiting for their end, and close the log."""
        for name in list(self.open):
            for _ in range(_DRAIN):
                if not self.read(name, now):
                    break
        for name in list(self.open):  # no end in sight: a process that left the session holds the pipe
            self._streams[name].finish(now)
        self.open.clear()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self._file.closed:
                view = view[self._file.write(view) :]
        except OSError as error:
            if self._complain is not None:
                self._complain(f"cannot write {self._path}: {error.strerror}; training goes on without it")
                self._complain = None
