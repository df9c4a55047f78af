"""Ranks as processes of this machine, each the leader of a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from poseidon.cluster.base import Task
from poseidon.cluster.guard import PARENT_PID
from poseidon.cluster.sessions import Keeper, kill_session, members

_UNKNOWN = 255  # somebody else reaped our child: never to be mistaken for success


class LocalProcess:
    """Implements :class:`poseidon.cluster.base.Process`.

    The leader is reaped last, in :meth:`close`: until then its id, which is that of its session and
    process group, cannot pass to a stranger whom our signals would hit.
    """

    def __init__(self, popen: subprocess.Popen[bytes], keeper: Keeper) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._popen = popen
        self._keeper = keeper
        self._status: int | None = None
        self._outputs = {"stdout": popen.stdout.fileno(), "stderr": popen.stderr.fileno()}
        for fd in self._outputs.values():
            os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def outputs(self) -> Mapping[str, int]:
        return self._outputs

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._look()
        return self._status

    def _look(self) -> int | None:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._popen.poll()
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return _UNKNOWN
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def lingering(self) -> bool:
        return bool(members(self.pid))

    def terminate(self) -> None:
        # To the leader alone: data-loading workers killed under a rank that still tidies up would only
        # make it fail.
        if self.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self._popen.returncode is None:
            kill_session(self.pid)

    def close(self) -> None:
        self.kill()
        self._keeper.forget(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=1)  # dead already, unless the kernel won't let it
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()


class LocalLauncher:
    """Implements :class:`poseidon.cluster.base.Launcher` on this machine, whatever the task's host."""

    warnings: Sequence[str] = ()

    def __init__(self) -> None:
        self._keeper: Keeper | None = None

    def start(self, task: Task) -> LocalProcess:
        if self._keeper is None:
            self._keeper = Keeper()
        popen = subprocess.Popen(
            task.argv,
            env={**task.env, "PYTHONUNBUFFERED": "1", PARENT_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=task.pass_fds,
            start_new_session=True,  # the terminal's Ctrl-C is the launcher's alone
        )
        self._keeper.watch(popen.pid)
        return LocalProcess(popen, self._keeper)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
