"""Interface addresses, and ZeroMQ's words for them."""

from __future__ import annotations

import contextlib
import ipaddress


def url(address: str) -> str:
    return f"tcp://[{address}]" if ":" in address else f"tcp://{address}"


def is_loopback(address: str) -> bool:
    """A host name is not (except localhost): what it stands for is decided elsewhere."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"
