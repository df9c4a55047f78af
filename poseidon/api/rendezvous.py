"""Meeting the other ranks: torch's store (strings and numbers only), torch's process group, our own mesh."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from poseidon.api.env import JobEnv, gloo_on_loopback
from poseidon.errors import PoseidonError, UserError
from poseidon.transport import TOKEN_BYTES, ZmqEndpoint, is_loopback

log = logging.getLogger("poseidon")

#: How long ranks may take to appear: importing torch on a loaded machine takes its time.
START_SECONDS = 120.0
#: Silence after which a wait says what it waits for.
WARN_SECONDS = 30.0
_POLL = timedelta(seconds=1)

#: Raises when nothing can come from a rank any more: (rank, what it owes, has it come by now?).
Check = Callable[[int, str, Callable[[], bool]], None]


def _nothing(rank: int, what: str, came: Callable[[], bool]) -> None: ...


def join(job: JobEnv, device: torch.device, timeout: float) -> Any:
    """Join torch's default process group unless the script has, and return a store of this session's own.

    Args:
        timeout: seconds that a collective of that process group may take.

    Raises:
        PoseidonError: not all ranks came, or the store cannot be reached.
    """
    if not dist.is_initialized():
        if job.one_host:
            gloo_on_loopback()
        try:
            _init(job, device, timedelta(seconds=timeout))
        except dist.DistError as error:
            raise PoseidonError(
                f"rank {job.rank} of {job.world_size} cannot join the job at {job.master_addr}:{job.master_port}: "
                f"{str(error).splitlines()[0]}"
            ) from error
    store: Any = dist.distributed_c10d._get_default_store()
    while job.servers and isinstance(store, dist.PrefixStore):  # the process group's own prefix, which they do not know
        store = store.underlying_store
    return _of_this_session(job, store)


def join_to_serve(job: JobEnv) -> Any:
    """The same store for a rank that is no worker, and so of no process group."""
    return _of_this_session(job, _own_store(job, timedelta(seconds=START_SECONDS)))


def _of_this_session(job: JobEnv, store: Any) -> Any:
    # A restarted job, or a second session in one process, must not meet the leftovers of its predecessor.
    store = dist.PrefixStore(f"poseidon/{job.attempt}", store)
    return dist.PrefixStore(str(store.add(f"sessions/{job.rank}", 1)), store)


def _init(job: JobEnv, device: torch.device, timeout: timedelta) -> None:
    """Wait for all ranks ourselves: torch would wait for a missing one as long as for a slow one, and not name it."""
    rank, size, start = job.rank, job.world_size, timedelta(seconds=START_SECONDS)
    if job.store_fd is None:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=start)))
    else:
        store = _own_store(job, start)
    store.set(f"here/{job.attempt}/{rank}", _gpu(device))
    gpus = [get(store, f"here/{job.attempt}/{peer}", peer, "a sign of life", START_SECONDS) for peer in range(size)]
    dist.init_process_group(_backend(gpus), store=store, rank=rank, world_size=size, timeout=timeout)


def _own_store(job: JobEnv, timeout: timedelta) -> Any:
    """Our launchers hand rank 0 a bound socket: torch alone would listen on every interface."""
    if job.rank == 0:
        return dist.TCPStore(
            job.master_addr,
            job.master_port,
            job.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=job.store_fd,
            use_libuv=True,
        )
    return dist.TCPStore(job.master_addr, job.master_port, job.world_size, is_master=False, timeout=timeout)


def _gpu(device: torch.device) -> str:
    """What no other GPU is called, whatever its number in another process or host; "" for no GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _backend(gpus: Sequence[str]) -> str:
    """Of the process group: NCCL cannot have two ranks on one GPU.

    Args:
        gpus: by rank, as :func:`_gpu` calls them.
    """
    own = all(gpus) and len(set(gpus)) == len(gpus)
    return "nccl" if own and dist.is_nccl_available() else "gloo"


def mesh(job: JobEnv, encryption: str | None) -> ZmqEndpoint:
    """This rank's endpoint, not yet connected."""
    address = "127.0.0.1" if job.one_host else _address_towards(job.master_addr)
    return ZmqEndpoint(job.rank, job.world_size + job.servers, address=address, encryption=encryption)


def connect(job: JobEnv, store: Any, endpoint: ZmqEndpoint) -> None:
    """Exchange endpoints and the job's token through the store, then connect everyone with everyone."""
    if job.rank == 0:
        store.set("token", secrets.token_hex(TOKEN_BYTES))
    store.set(f"endpoint/{job.rank}", endpoint.contact)
    everyone = range(job.world_size + job.servers)
    contacts = [get(store, f"endpoint/{rank}", rank, "its endpoint", START_SECONDS) for rank in everyone]
    token = bytes.fromhex(get(store, "token", 0, "the job's token", START_SECONDS))
    endpoint.connect(contacts, token, START_SECONDS)


def devices(job: JobEnv, store: Any, per_node: int | None) -> list[int]:
    """Ranks of each node: ``per_node``, or what the launcher has started on each of several machines."""
    if per_node is not None:
        return [per_node] * (job.world_size // per_node)
    if job.one_host:
        return [1] * job.world_size
    store.set(f"local/{job.rank}", str(job.local_rank))
    nodes: list[int] = []
    for rank in range(job.world_size):
        if int(get(store, f"local/{rank}", rank, "its place on its machine", START_SECONDS)) == 0 or not nodes:
            nodes.append(0)
        nodes[-1] += 1
    return nodes


def get(store: Any, key: str, rank: int, what: str, timeout: float, check: Check = _nothing) -> str:
    """A value that `rank` will put into the store.

    Args:
        check: called every second; raises when the run has failed meanwhile, or `rank` has left.

    Raises:
        PoseidonError: not there after `timeout` seconds; names the rank.
    """
    start = time.monotonic()
    warn = start + WARN_SECONDS
    while True:
        try:
            with contextlib.suppress(dist.DistStoreError):  # not there yet
                store.wait([key], _POLL)
                return str(store.get(key), "utf-8")
        except dist.DistNetworkError as error:
            raise PoseidonError(f"the job's store is gone while waiting for rank {rank}: {what}") from error
        check(rank, what.removeprefix("its "), lambda: bool(store.check([key])))
        now = time.monotonic()
        if now > start + timeout:
            raise PoseidonError(f"rank {rank} has not given {what} within {timeout:.0f} s")
        if now > warn:
            log.warning("has waited %.0f s for rank %d: %s", now - start, rank, what)
            warn = now + WARN_SECONDS


def _address_towards(host: str) -> str:
    """The address of the interface by which this host reaches rank 0 (no packet is sent).

    Raises:
        UserError: `host` has no address, or only one that other hosts cannot reach.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"MASTER_ADDR={host} cannot be reached from this host: {error}") from None
    if is_loopback(address):
        # Debian's /etc/hosts maps a host's own name to 127.0.1.1.
        raise UserError(
            f"MASTER_ADDR={host} is {where[0]} on this host, where other hosts cannot reach it: give the address "
            "of an interface instead"
        )
    return address


def gather(store: Any, job: JobEnv, number: int, value: Any, timeout: float, check: Check = _nothing) -> list[Any]:
    """Every rank's value, in rank order. `number` counts the calls, equal on all ranks."""
    store.set(f"gather/{number}/{job.rank}", json.dumps(value))
    what = f"its value of gather {number}"
    result = [
        json.loads(get(store, f"gather/{number}/{rank}", rank, what, timeout, check)) for rank in range(job.world_size)
    ]
    # The store lives in rank 0's process, which may end after this: not before everyone has read.
    store.set(f"read/{number}/{job.rank}", "")
    if job.rank == 0:
        for rank in range(job.world_size):
            get(store, f"read/{number}/{rank}", rank, f"its receipt of gather {number}", timeout, check)
    if number >= 2:
        # Everyone is past gather number - 1, so nobody will read number - 2 any more.
        store.delete_key(f"gather/{number - 2}/{job.rank}")
        store.delete_key(f"read/{number - 2}/{job.rank}")
    return result


def peek(store: Any, number: int, rank: int) -> Any:
    """What `rank` has given to a gather that this rank has not entered; None if nothing."""
    key = f"gather/{number}/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else None
