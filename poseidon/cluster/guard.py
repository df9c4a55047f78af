"""Keeps a rank from outliving its launcher, from the rank's side. A worker calls it before anything else."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: Set by the local launcher: its own process id, so that a rank can tell that it has been orphaned already.
PARENT_PID = "POSEIDON_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies, even by kill -9. Linux; elsewhere a no-op.

    Second line of defence: the launcher's keeper (:mod:`poseidon.cluster.sessions`) also ends what the
    rank has started, and works everywhere; this holds even if the keeper is killed too. It is done here
    and not between fork and exec, where no Python code is safe in a program with threads.

    The kernel watches the *thread* that started us; ``launch_job`` stays in it until the job is over.
    """
    expected = os.environ.pop(PARENT_PID, "")
    if sys.platform != "linux":
        return
    parent = int(expected) if expected.isdecimal() else os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew that we mind
        os._exit(1)
