"""Process sessions: who is in one, ending one, and the keeper that ends them when the launcher is gone.

Every rank leads a session of its own, so "the rank and everything it started" is a session. Nothing but
the standard library here: the keeper runs this file by its path, isolated, in some 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

_PASSES = 10  # a process that forks while we look is caught by the next pass


def members(sid: int) -> list[int]:
    """Living processes of session ``sid`` (zombies do not count). Without /proc: none are found."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == sid and not _is_zombie(pid):
                found.append(pid)
    return found


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def kill_session(sid: int) -> None:
    """SIGKILL to all of session ``sid``. Before its leader is reaped: only so long is the id its own."""
    with contextlib.suppress(OSError):
        os.killpg(sid, signal.SIGKILL)
    for _ in range(_PASSES):  # those that moved to other process groups of the session
        left = members(sid)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


class Keeper:
    """A small process that outlives us and kills the sessions entrusted to it when we die, however we die.

    PR_SET_PDEATHSIG reaches only the ranks, and only those that asked for it; this reaches what the ranks
    started as well, and on every Unix.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # it must not hold the terminal's or a pipe's end open after us
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def watch(self, sid: int) -> None:
        self._send(f"+{sid}\n")

    def forget(self, sid: int) -> None:
        self._send(f"-{sid}\n")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it: the ranks' own guard remains
            self._process.stdin.write(line.encode())

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=2)


def _keep() -> None:
    """Read "+sid" and "-sid" lines; when they end, or the parent changes, kill the sessions still there."""
    parent, pending, sessions = os.getppid(), b"", set[int]()
    while os.getppid() == parent:  # a forked stranger may hold the pipe open: its end alone is not enough
        if not select.select([0], [], [], 1.0)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
    for sid in sessions:
        kill_session(sid)


if __name__ == "__main__":
    _keep()
