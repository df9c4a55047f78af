"""The environment of each rank, and the socket that its rendezvous store listens on."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

from poseidon.emulation.links import INTERFACE, address

#: Rank 0: number of an inherited descriptor, a socket bound and listening on MASTER_ADDR:MASTER_PORT; on the
#: others NO_FD: rank 0 serves the store there.
STORE_FD = "POSEIDON_STORE_FD"
NO_FD = -1
#: Ranks from WORLD_SIZE on, which only serve.
SERVERS = "POSEIDON_SERVERS"
#: Of the store on an emulated network: nobody else is on rank 0's address, and the port is below the ephemeral ones.
NODE_PORT = 29500
_LOOPBACK = "127.0.0.1"
# torch.distributed believes these and would look for an agent's store that is not ours.
_FOREIGN = "TORCHELASTIC_"


def listening_socket(world_size: int) -> socket.socket:
    """A loopback socket that listens on a port of the system's choice.

    It is handed over open, so nobody can take the port between choosing it and using it.
    """
    return socket.create_server((_LOOPBACK, 0), backlog=max(128, 2 * world_size))


def rank_environment(
    rank: int,
    world_size: int,
    devices: int,
    *,
    base: Mapping[str, str],
    threads: int,
    store: socket.socket | None,
    servers: int = 0,
) -> dict[str, str]:
    """``base`` with what rank ``rank`` of ``world_size`` needs, as torchrun would name it.

    Args:
        devices: ranks of a node.
        servers: ranks from ``world_size`` on, which only serve.
        store: that all ranks on this one host meet at; None: they are on the nodes of an emulated network.
    """
    env = {key: value for key, value in base.items() if not key.startswith(_FOREIGN) and key != STORE_FD}
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        SERVERS: str(servers),
    }
    return env | (_on_a_node(rank, devices, base) if store is None else _on_this_host(rank, world_size, store))


def _on_this_host(rank: int, world_size: int, store: socket.socket) -> dict[str, str]:
    host, port = store.getsockname()[:2]
    env = {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        STORE_FD: str(store.fileno() if rank == 0 else NO_FD),
    }
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo advertises what the host name resolves to, if it does
    return env


def _on_a_node(rank: int, devices: int, base: Mapping[str, str]) -> dict[str, str]:
    """Rank 0 listens for the store itself: a socket of ours would be in another network."""
    return {
        # Else torch warns that nobody there tells it the nodes' names.
        "TORCH_CPP_LOG_LEVEL": base.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "LOCAL_RANK": str(rank % devices),
        "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(NODE_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
