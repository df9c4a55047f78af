"""``init()``: how a process becomes a rank of its job."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from poseidon.api import rendezvous
from poseidon.api.env import JobEnv, cublas_as_before, read_env
from poseidon.api.session import Session, one_of
from poseidon.engine import Device, Exchange
from poseidon.engine.server import serve as run_server
from poseidon.errors import UserError
from poseidon.planning import Topology

log = logging.getLogger("poseidon")


def init(
    *,
    timeout: float = 600.0,
    encryption: Literal["curve", "none"] | None = None,
    device: str | torch.device | None = None,
    devices_per_node: int | None = None,
    servers: Sequence[int] | None = None,
) -> Session:
    """Join the job that torchrun (or any launcher that sets its variables) started.

    Joins torch's default process group if the script has not yet; gradients of our own schemes never use it.
    Without those variables, or with a world of one, nothing is opened at all.

    Args:
        timeout: seconds a wait for a silent peer may last.
        encryption: needed when ranks are on several hosts: ``"curve"`` encrypts everything, ``"none"`` sends
            gradients in the clear.
        devices_per_node: successive ranks that form a node: what they have is merged before it leaves the node, and
            comm="hybrid" counts nodes. By default those that torchrun has started on one machine, where there are
            several machines; on one, every rank counts as a node.
        servers: numbers of the nodes that own server shards; default: all.
        device: this rank's device; default ``cuda:LOCAL_RANK`` where there is one, else ``cpu``. Where ranks are more
            than GPUs, they share them. A GPU becomes this process's current one.

    Raises:
        UserError: a bad environment or argument. PoseidonError: a rank did not appear; names it.
    """
    job = read_env()
    if encryption is not None:
        one_of("encryption", encryption, ("curve", "none"))
    if devices_per_node is not None and (devices_per_node < 1 or job.world_size % devices_per_node):
        raise UserError(f"devices_per_node={devices_per_node} must divide the {job.world_size} ranks into nodes")
    if servers is not None and not servers:
        raise UserError("servers=[]: somebody must serve")
    if timeout <= 0:
        raise UserError(f"timeout={timeout} must be positive seconds")
    place = _device(device, job)
    if job.world_size == 1 and not job.servers:
        return Session(job, place, timeout=timeout)
    owns = not dist.is_initialized()
    start = time.monotonic()
    # First the socket, which refuses other hosts without `encryption`, then the wait for other ranks.
    endpoint = rendezvous.mesh(job, encryption)
    try:
        store = rendezvous.join(job, place, timeout)
    except BaseException:
        endpoint.close(0)
        raise
    try:
        topology = topology_of(job, rendezvous.devices(job, store, devices_per_node), servers)
    except BaseException:
        endpoint.close(0)
        raise
    session = Session(job, place, store=store, endpoint=endpoint, timeout=timeout, topology=topology)
    session._owns_process_group = owns
    try:
        rendezvous.connect(job, store, endpoint)
    except BaseException:
        session.leave()
        raise
    log.debug("rank %d joined %d ranks in %.1f s", job.rank, job.world_size, time.monotonic() - start)
    atexit.register(session.leave)
    return session


def topology_of(job: JobEnv, devices: Sequence[int], servers: Sequence[int] | None) -> Topology:
    """Raises UserError when there is no such node."""
    for node in servers or ():
        if node not in range(len(devices)):
            raise UserError(f"servers={list(servers or ())}: there are nodes 0 to {len(devices) - 1}")
    return Topology.of(devices, job.servers or servers)


def serve(
    *, timeout: float, encryption: Literal["curve", "none"] | None, devices_per_node: int, device: Device
) -> None:
    """Be a rank that only owns shards, until all workers have left.

    Args:
        device: whose host sums.
    """
    job = read_env()
    endpoint = rendezvous.mesh(job, encryption)
    try:
        store = rendezvous.join_to_serve(job)
        topology = Topology.of(rendezvous.devices(job, store, devices_per_node), job.servers)
        exchange = Exchange(endpoint, timeout, topology)
        rendezvous.connect(job, store, endpoint)
    except BaseException:
        endpoint.close(0)
        raise
    try:
        run_server(exchange, device)
    finally:
        exchange.close()


def _device(device: str | torch.device | None, job: JobEnv) -> torch.device:
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type != "cuda":
        return place
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UserError(f"device={device}: torch sees no CUDA device here; take device=cpu")
    if place.index is None:
        place = torch.device("cuda", job.local_rank % count)
    if place.index >= count:
        raise UserError(f"device={device}: torch sees {count} CUDA device{'s' if count > 1 else ''} here, from 0 on")
    cublas_as_before()
    torch.cuda.set_device(place)
    return place
