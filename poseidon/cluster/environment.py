"""The environment of each rank, and the socket that its rendezvous store listens on."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

#: Rank 0: number of an inherited descriptor, a socket bound and listening on MASTER_ADDR:MASTER_PORT; on the
#: others NO_FD: rank 0 serves the store there.
STORE_FD = "POSEIDON_STORE_FD"
NO_FD = -1
_LOOPBACK = "127.0.0.1"
# torch.distributed believes these and would look for an agent's store that is not ours.
_FOREIGN = "TORCHELASTIC_"


def listening_socket(world_size: int) -> socket.socket:
    """A loopback socket that listens on a port of the system's choice.

    It is handed over open, so nobody can take the port between choosing it and using it.
    """
    return socket.create_server((_LOOPBACK, 0), backlog=max(128, 2 * world_size))


def rank_environment(
    rank: int, world_size: int, *, base: Mapping[str, str], threads: int, store: socket.socket
) -> dict[str, str]:
    """``base`` with what rank ``rank`` of ``world_size`` on one host needs, as torchrun would name it."""
    env = {key: value for key, value in base.items() if not key.startswith(_FOREIGN) and key != STORE_FD}
    address, port = store.getsockname()[:2]
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo advertises what the host name resolves to, if it does
    env[STORE_FD] = str(store.fileno() if rank == 0 else NO_FD)
    return env
