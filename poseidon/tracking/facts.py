"""Facts about the code and the machine of a run. Imports nothing heavy."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import poseidon

#: name in the record -> distribution
_PACKAGES = {"torch": "torch", "torchvision": "torchvision", "pyzmq": "pyzmq", "hydra": "hydra-core"}


def versions() -> dict[str, str | None]:
    """Of Python, Poseidon and what results depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "poseidon": poseidon.__version__}
    for name, distribution in _PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def host_facts() -> dict[str, str | int | None]:
    """Of this machine; memory in bytes."""
    return {
        "name": socket.gethostname(),
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
    }


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def git_state() -> dict[str, str | bool | None]:
    """``git_commit`` of the checkout around the current folder, else around this package (None: neither is
    in one), and ``git_dirty``: whether tracked files were edited since."""
    for folder in (Path.cwd(), Path(__file__).parent):
        commit = _git(folder, "rev-parse", "HEAD")
        if commit:
            edited = _git(folder, "status", "--porcelain", "--untracked-files=no")
            return {"git_commit": commit, "git_dirty": bool(edited)}
    return {"git_commit": None, "git_dirty": None}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or None
