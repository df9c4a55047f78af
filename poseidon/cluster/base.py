"""What a launcher is: "start this argv with this environment on that host and tell me how it ended".

:mod:`poseidon.cluster.job` knows only these protocols, so that hosts of other kinds (network namespaces, ssh)
need a :class:`Launcher` and a :class:`Process` of their own and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: Receives each line for the terminal: rank, stream ("stdout" or "stderr") and text without its newline.
#: What the launcher itself has to say comes with rank ``LAUNCHER`` and stream "launcher".
OnLine = Callable[[int, str, str], None]
LAUNCHER = -1


@dataclass(frozen=True)
class Task:
    """One rank to be started.

    Attributes:
        env: the whole environment of the process, not additions to ours.
        log: file that receives the rank's output, both streams, without prefixes.
        pass_fds: descriptors that the process inherits under the same numbers (local hosts only).
        host: index of the host in the cluster.
    """

    rank: int
    argv: list[str]
    env: dict[str, str]
    log: Path
    pass_fds: tuple[int, ...] = ()
    host: int = 0


class Process(Protocol):
    """A started rank. None of the methods blocks for long or fails because the rank is gone already."""

    @property
    def outputs(self) -> Mapping[str, int]:
        """Non-blocking readable descriptors of "stdout" and "stderr"; closed by :meth:`close`."""

    def poll(self) -> int | None:
        """None while it runs, then its exit code, or minus the number of the signal that ended it."""

    def lingering(self) -> bool:
        """Whether something that the rank started outlives it."""

    def terminate(self) -> None:
        """Ask the rank to end (SIGTERM). What it started is its own business as long as it lives."""

    def kill(self) -> None:
        """End the rank and everything that it started, at once."""

    def close(self) -> None:
        """Kill what is left of it, forget it, close the descriptors."""


class Launcher(Protocol):
    """Starts ranks on hosts of one kind."""

    @property
    def warnings(self) -> Sequence[str]:
        """What its hosts lack of what the config asks for, a line each."""

    def start(self, task: Task) -> Process:
        """Start one rank.

        Raises:
            OSError: it could not be started.
        """

    def close(self) -> None:
        """Let go of what the launcher itself holds. All its processes are closed by then."""


@dataclass(frozen=True)
class Grace:
    """How long things may take on the way out, in seconds.

    After a rank's death all is over within ``peers + term`` plus a second or two: far less than 15 s.

    Attributes:
        peers: for the other ranks to notice a death and end by themselves, before SIGTERM.
        term: from SIGTERM to SIGKILL after a failure.
        interrupt: from SIGTERM to SIGKILL after Ctrl-C.
        linger: for what an ended rank started (shared-memory trackers tidy up), before SIGKILL.
        hold: how long a traceback of a rank that goes on running is kept from the terminal.
        abandon: from SIGKILL to giving up on a process that the kernel will not let die.
    """

    peers: float = 4.0
    term: float = 3.0
    interrupt: float = 5.0
    linger: float = 1.0
    hold: float = 6.0  # exiting takes a rank seconds where cores are short
    abandon: float = 3.0


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        ok: every rank ended with 0 and nobody interrupted.
        exit_code: for the calling process: 0; that of the rank that failed first (128 + signal number
            if a signal ended it); 130 after Ctrl-C, 143 after SIGTERM.
        failed_rank: the rank that failed first, if it is known.
        reason: one line: which rank, and how it ended. Empty if ok.
        interrupted: the user, or SIGTERM to the launcher, ended it.
        exit_codes: of each rank as :meth:`Process.poll` gives it; None: never started, or would not die.
        warnings: what the cluster lacks of what the config asks for, a line each.
    """

    ok: bool
    exit_code: int
    failed_rank: int | None
    reason: str
    interrupted: bool
    exit_codes: tuple[int | None, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """ "completed", "failed" or "interrupted", as run records call it."""
        return "completed" if self.ok else "interrupted" if self.interrupted else "failed"
