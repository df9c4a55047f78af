"""Forked children (data-loading workers) must not keep a dead rank's connections alive.

A TCP connection ends when its last holder closes it: with a copy in a worker process, peers of a killed rank
would wait for as long as its workers live.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat


def close_inherited(own_ports: set[int], peers: set[tuple[str, int]]) -> None:
    """In a child right after fork: close every TCP socket of the mesh. The parent's copies are untouched.

    Args:
        own_ports: local ports that listen. peers: (address, port) that outgoing connections lead to.
    """
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _of_mesh(fd, own_ports, peers):
                os.close(fd)


def _of_mesh(fd: int, own_ports: set[int], peers: set[tuple[str, int]]) -> bool:
    sock = socket.socket(fileno=fd)
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if sock.getsockname()[1] in own_ports:
            return True
        with contextlib.suppress(OSError):
            return sock.getpeername()[:2] in peers
        return False
    finally:
        sock.detach()
