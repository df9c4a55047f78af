"""Meeting through a store: here one that lives in this process."""

from __future__ import annotations

import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from poseidon.api import rendezvous, start
from poseidon.api.env import JobEnv
from poseidon.errors import PeerLostError, PoseidonError, UserError
from poseidon.transport import ZmqEndpoint
from tests.transport.mesh import Recorder

LIMIT = 10.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rendezvous, "_POLL", timedelta(seconds=0.05))


@pytest.fixture
def store():
    return dist.HashStore()


def test_connect(store):
    jobs = [JobEnv(rank, 3, rank, 3) for rank in range(3)]
    endpoints = [rendezvous.mesh(job, None) for job in jobs]
    try:
        for endpoint in endpoints:
            endpoint.start(Recorder())
        with ThreadPoolExecutor(3) as pool:
            joined = [pool.submit(rendezvous.connect, j, store, e) for j, e in zip(jobs, endpoints, strict=True)]
            for future in joined:
                future.result(LIMIT)
        assert all('"127.0.0.1"' in endpoint.contact for endpoint in endpoints)
    finally:
        for endpoint in endpoints:
            endpoint.close(0)


def test_devices_of_a_node_are_what_was_started_on_one_of_several_machines(store):
    places = [0, 1, 2, 0, 1]
    jobs = [JobEnv(rank, 5, place, 3 if rank < 3 else 2, "10.0.0.1") for rank, place in enumerate(places)]
    with ThreadPoolExecutor(5) as pool:
        found = [pool.submit(rendezvous.devices, job, store, None) for job in jobs]
        assert [future.result(LIMIT) for future in found] == [[3, 2]] * 5
    assert rendezvous.devices(JobEnv(0, 4, 0, 4), store, None) == [1] * 4  # one machine: every process a node
    assert rendezvous.devices(JobEnv(0, 4, 0, 4), store, 2) == [2, 2]


def test_a_missing_rank_is_named(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "START_SECONDS", 0.2)
    endpoint = ZmqEndpoint(0, 2)
    try:
        with pytest.raises(PoseidonError, match="rank 1 has not given its endpoint within 0 s"):
            rendezvous.connect(JobEnv(0, 2, 0, 2), store, endpoint)
    finally:
        endpoint.close(0)


@pytest.mark.parametrize("launcher", ["ours", "another"])
def test_a_rank_that_never_starts(launcher, monkeypatch):
    """Before torch's process group would wait for it, far longer."""
    monkeypatch.setattr(rendezvous, "START_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        fd = os.dup(listening.fileno())  # the store closes it
    if launcher == "another":
        os.close(fd)
    job = JobEnv(0, 2, 0, 2, "127.0.0.1", port, fd if launcher == "ours" else None)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("RANK", 0), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    wanted = "rank 1 has not given a sign of life" if launcher == "ours" else "1/2 clients joined"
    with pytest.raises(PoseidonError, match=wanted):
        rendezvous.join(job, torch.device("cpu"), 5.0)
    assert not dist.is_initialized()


def test_gather_in_rank_order(store):
    def body(rank: int) -> list[list]:
        job = JobEnv(rank, 3)
        return [rendezvous.gather(store, job, n, {"rank": rank, "n": n}, LIMIT) for n in range(1, 6)]

    with ThreadPoolExecutor(3) as pool:
        for result in pool.map(body, range(3)):
            assert result == [[{"rank": r, "n": n} for r in range(3)] for n in range(1, 6)]
    assert not any(store.check([f"gather/{n}/{r}"]) for n in range(1, 4) for r in range(3))
    assert not any(store.check([f"read/{n}/{r}"]) for n in range(1, 4) for r in range(3))


def test_the_stores_owner_stays_until_everyone_has_read(store):
    """The store lives in rank 0's process: if it ended after its own gather, the others could not read."""
    store.set("gather/1/1", "1")
    done = threading.Event()

    def owner() -> None:
        rendezvous.gather(store, JobEnv(0, 2), 1, 0, LIMIT)
        done.set()

    thread = threading.Thread(target=owner)
    thread.start()
    store.wait(["read/1/0"], timedelta(seconds=LIMIT))
    assert not done.wait(0.2)
    store.set("read/1/1", "")
    assert done.wait(LIMIT)
    thread.join(LIMIT)


def test_get_names_the_rank_and_warns(store, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "WARN_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING), pytest.raises(PoseidonError, match="rank 2 has not given its value"):
        rendezvous.get(store, "x", 2, "its value", 0.5)
    assert "for rank 2: its value" in caplog.text


def test_get_asks_whether_anything_can_still_come(store):
    asked = []

    def check(rank, what, came):
        asked.append((rank, what, came()))
        if len(asked) == 2:
            raise PeerLostError(rank, "lost")

    with pytest.raises(PeerLostError, match="lost"):
        rendezvous.get(store, "x", 2, "its value", LIMIT, check)
    assert asked == [(2, "value", False)] * 2


def test_what_was_left_behind_is_still_taken(store):
    """A rank that put its value there and left between two looks owes nothing."""

    def check(rank, what, came):
        store.set("x", "7")
        assert came()

    assert rendezvous.get(store, "x", 2, "its value", LIMIT, check) == "7"


def test_a_name_that_means_loopback_here_is_no_address_for_others(monkeypatch):
    """Debian maps a host's own name to 127.0.1.1."""
    where = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [where])
    with pytest.raises(UserError, match=r"MASTER_ADDR=node0 is 127\.0\.1\.1 on this host"):
        rendezvous.mesh(JobEnv(0, 2, 0, 1, "node0", 1234), "curve")


def test_a_name_without_an_address():
    with pytest.raises(UserError, match=r"MASTER_ADDR=nowhere\.invalid cannot be reached"):
        rendezvous.mesh(JobEnv(0, 2, 0, 1, "nowhere.invalid", 1234), "curve")


@pytest.mark.parametrize(
    ("gpus", "nccl", "wanted"),
    [
        (["", ""], True, "gloo"),
        (["a", "b"], True, "nccl"),
        (["a", "a"], True, "gloo"),  # two ranks on one GPU
        (["a", ""], True, "gloo"),
        (["a", "b"], False, "gloo"),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_each(gpus, nccl, wanted, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    assert rendezvous._backend(gpus) == wanted


def test_ranks_tell_their_gpus_before_they_choose(monkeypatch):
    """By what they are, not by number: each process may see but one, number 0."""
    threads = threading.local()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=threads.gpu))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    chosen: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: chosen.append(backend))
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_own_store", lambda job, timeout: store)

    def body(rank: int) -> None:
        threads.gpu = f"GPU-{rank}"
        rendezvous._init(JobEnv(rank, 2, store_fd=0), torch.device("cuda", 0), timedelta(seconds=LIMIT))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, range(2)))
    assert chosen == ["nccl", "nccl"]


def test_a_ranks_device(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [start._device(None, JobEnv(rank, 4, rank, 4)).index for rank in range(4)] == [0, 1, 0, 1]
    assert start._device("cuda", JobEnv(3, 4, 3, 4)) == torch.device("cuda", 1)
    assert start._device("cuda:0", JobEnv(3, 4, 3, 4)) == torch.device("cuda", 0)
    assert start._device("cpu", JobEnv(3, 4, 3, 4)) == torch.device("cpu")
    assert [place.index for place in current] == [0, 1, 0, 1, 1, 0]
    with pytest.raises(UserError, match="device=cuda:2: torch sees 2 CUDA devices here, from 0 on"):
        start._device("cuda:2", JobEnv(0, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cuda: torch sees no CUDA device here; take device=cpu"):
        start._device("cuda", JobEnv(0, 1))
    assert start._device(None, JobEnv(0, 1)) == torch.device("cpu")
