"""The environment that a launcher sets, read in this one place."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from poseidon.errors import UserError
from poseidon.transport import is_loopback


@dataclass(frozen=True)
class JobEnv:
    """Who this process is in its job (torchrun's variables).

    Attributes:
        store_fd: started by our own launchers: rank 0's inherited listening socket for the store, -1 on the
            others; None: the store is torch's business.
        attempt: restarts so far; a restarted job must not meet the leftovers of its predecessor.
        servers: ranks from world_size on, which only serve; started by our own launchers.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    store_fd: int | None = None
    attempt: int = 0
    servers: int = 0

    @property
    def one_host(self) -> bool:
        """All ranks on this machine: loopback is enough."""
        together = self.local_world_size == self.world_size and not self.servers
        return together or is_loopback(self.master_addr)


def read_env(environ: Mapping[str, str] | None = None) -> JobEnv:
    """Raises UserError when a variable is missing or no number, naming it."""
    env = os.environ if environ is None else environ
    if not env.get("RANK") and not env.get("WORLD_SIZE"):
        return JobEnv()
    missing = [name for name in ("RANK", "WORLD_SIZE") if not env.get(name)]
    world_size = _number(env, "WORLD_SIZE", 1)
    if world_size > 1:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set, but RANK or WORLD_SIZE is: start with torchrun or poseidon train"
        )
    rank = _number(env, "RANK", 0)
    servers = _number(env, "POSEIDON_SERVERS", 0)
    if not 0 <= rank < world_size + servers:
        raise UserError(f"RANK={rank} is outside WORLD_SIZE={world_size}")
    address = env.get("MASTER_ADDR") or "127.0.0.1"
    port = _number(env, "MASTER_PORT", 0)
    if world_size > 1 and not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT={port} is not a port (1 to 65535)")
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", world_size if is_loopback(address) else 1)
    if not 1 <= local_world_size <= world_size:
        raise UserError(f"LOCAL_WORLD_SIZE={local_world_size} is outside 1 to WORLD_SIZE={world_size}")
    return JobEnv(
        rank,
        world_size,
        _number(env, "LOCAL_RANK", rank % local_world_size),
        local_world_size,
        address,
        port,
        _number(env, "POSEIDON_STORE_FD", -1) if env.get("POSEIDON_STORE_FD") else None,
        _number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        servers,
    )


def gloo_on_loopback() -> None:
    """Keep gloo, which resolves the host name otherwise, on the loopback interface of a one-host job."""
    name = {"Linux": "lo", "Darwin": "lo0"}.get(platform.system())
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def cublas_as_before() -> None:
    """Let cuBLAS give the same bits on every run and rank, also where several streams are at work; to be said before it
    begins."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UserError(f"{name}={text!r} is not a whole number") from None
