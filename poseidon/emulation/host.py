"""What this machine offers for emulated networks: tools, rights, kernel. What is missing is said in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import UserError

SECONDS = 30.0  # that any of the tools may take
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
# A user's PATH often lacks the places where they lie.
_PLACES = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
#: Settings that keep users from making namespaces, what they are then, and what they must be.
_LOCKS = (
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ("user/max_net_namespaces", "0", "user.max_net_namespaces=10000"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)


@dataclass(frozen=True)
class Host:
    """How network namespaces are made here.

    Attributes:
        ip, tc, unshare, nsenter: the programs' paths.
        user: within a user namespace, as a user who is not root may.
    """

    ip: str
    tc: str
    unshare: str
    nsenter: str
    user: bool = False

    def new(self, inside: int | None, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` in a network namespace of its own.

        Args:
            inside: a process of the user namespace to do it in; None: the first one, which makes that too.
        """
        made = [self.unshare, "--net", *argv]
        if not self.user:
            return made
        if inside is None:
            return [self.unshare, "--user", "--map-root-user", *made[1:]]
        return [self.nsenter, f"--target={inside}", "--user", "--preserve-credentials", *made]

    def enter(self, pid: int, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` in the network namespace of process ``pid``, under its own process id."""
        user = ["--user", "--preserve-credentials"] if self.user else []
        return [self.nsenter, f"--target={pid}", *user, "--net", *argv]


def find_host() -> Host:
    """Tries what is there.

    Raises:
        UserError: a tool or a right is missing; says what to install or to allow.
    """
    if sys.platform != "linux":
        raise UserError("cluster=emulated: needs Linux; leave cluster at local, or run it in a Linux machine")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_PLACES])
    found = {name: shutil.which(name, path=path) for name in _PACKAGES}
    missing = [name for name, place in found.items() if place is None]
    if missing:
        packages = " ".join(dict.fromkeys(_PACKAGES[name] for name in missing))
        raise UserError(f"cluster=emulated: needs {' and '.join(missing)}: apt install {packages} (Debian, Ubuntu)")
    ip, tc, unshare, nsenter = map(str, found.values())
    for user in (False, True):
        host = Host(ip, tc, unshare, nsenter, user)
        if _works(host):
            return host
    raise UserError(f"cluster=emulated: may not make network namespaces: {_remedy()}")


def congestion_controls() -> list[str]:
    """TCP's, that this kernel has."""
    return (_read("net/ipv4/tcp_available_congestion_control") or "").split()


def _works(host: Host) -> bool:
    # Changing a device is another right than making the namespace.
    command = host.new(None, [host.ip, "link", "set", "lo", "up"])
    return subprocess.run(command, capture_output=True, timeout=SECONDS, start_new_session=True).returncode == 0


def _remedy() -> str:
    locked = [setting for name, value, setting in _LOCKS if _read(name) == value]
    if locked:
        return f"run as root, or allow it: sysctl {' '.join(locked)}"
    return "run as root; in a container, start that with --cap-add=SYS_ADMIN --cap-add=NET_ADMIN"


def _read(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None
