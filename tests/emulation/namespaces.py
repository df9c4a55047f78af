"""Which network namespaces a process has made, and whether they are gone; skips where none can be made."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from poseidon.emulation.host import Host, find_host
from poseidon.errors import UserError

DEADLINE = 20.0  # seconds


def _host() -> tuple[Host | None, str]:
    try:
        return find_host(), ""
    except UserError as error:
        return None, str(error)


HOST, _WHY = _host()
#: Mark of tests that make namespaces.
needs_namespaces = pytest.mark.skipif(HOST is None, reason=_WHY or "-")


def keepers(pid: int) -> list[int]:
    """Processes that hold the namespaces of a run of process ``pid``."""
    sign = f"poseidon-net-{pid}-".encode()
    return [other for other in _pids() if sign in _read(other)]


def namespaces(pids: list[int]) -> set[str]:
    return {name for name in map(_namespace, pids) if name}


def wait_until_gone(found: set[str]) -> None:
    """Until no process is in any of these namespaces."""
    end = time.monotonic() + DEADLINE
    while found & namespaces(_pids()):
        assert time.monotonic() < end, "namespaces are left"
        time.sleep(0.01)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _read(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
