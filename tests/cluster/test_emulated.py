"""Jobs whose ranks are nodes of an emulated network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from poseidon.cluster import emulated, launch_job
from poseidon.cluster.validation import HEADERS, make_patterns, measure
from poseidon.config.schema import ClusterConfig, ClusterKind
from poseidon.errors import UserError
from tests.emulation.namespaces import keepers, namespaces, needs_namespaces, wait_until_gone

from .conftest import DEADLINE, QUICK, Job, alive, wait_until

ROOT = Path(__file__).parents[2]
#: Rank 1 greets rank 0 over the network.
GREET = """
import socket
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
print(where, *(os.environ[name] for name in names), os.environ.get("POSEIDON_STORE_FD"))
if rank == 0:
    with socket.create_server(where) as server:
        server.settimeout(20)
        note("listens")
        connection, (peer, _) = server.accept()
        print(peer, "says", connection.recv(100).decode())
else:
    wait_for("listens")
    with socket.create_connection(where, 20) as connection:
        connection.sendall(b"hello")
"""
#: Each rank leaves its process id, and a child's, and waits.
WAIT = """
child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
note(f"child{rank}.pid", subprocess.Popen([sys.executable, "-S", "-c", child]).pid)
note(f"{rank}.pid")
hang()
"""
DRIVER = """
import signal, sys
from pathlib import Path
from poseidon.cluster import Grace, launch_job
from poseidon.config.schema import ClusterConfig, ClusterKind
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell start with it ignored
here = Path(sys.argv[1])
cluster = ClusterConfig(ClusterKind.emulated, bandwidth="1gbit")
result = launch_job(sys.argv[2:], cluster, 2, here / "logs", env={"HERE": str(here)}, grace=Grace(interrupt=20.0))
sys.exit(result.exit_code)
"""


def cluster(**values):
    return ClusterConfig(ClusterKind.emulated, **values)


def run(job: Job, body: str, config: ClusterConfig | None = None, world_size: int = 2):
    return launch_job(
        job.script(body),
        config or cluster(),
        world_size,
        job.logs,
        env={"HERE": str(job.folder)},
        on_line=lambda *line: job.lines.append(line),
        grace=QUICK,
    )


@needs_namespaces
def test_each_rank_is_a_node_and_all_is_gone_afterwards(job: Job) -> None:
    seen: set[str] = set()
    body = 'note(f"net{rank}", os.readlink("/proc/self/ns/net"))' + GREET
    result = run(job, body, cluster(bandwidth="1gbit", latency="0.1ms"))
    assert result.ok
    seen = {(job.folder / f"net{rank}").read_text() for rank in range(2)}
    assert len(seen) == 2
    assert namespaces([os.getpid()]) & seen == set()
    said = "('10.77.0.1', 29500) 0 1 eth0 None"
    assert job.shown(0, "stdout") == [said, "10.77.0.2 says hello"]
    assert job.shown(1, "stdout") == [said]
    # What the kernel cannot do is said once, and kept with the result.
    assert job.shown(-1) == list(result.warnings)
    assert result.warnings in ((), ("this kernel has no netem: cluster.latency is not emulated",))
    assert keepers(os.getpid()) == []
    wait_until_gone(seen)


@needs_namespaces
def test_a_failed_rank_ends_the_job_and_all_is_gone(job: Job) -> None:
    body = """
    note(f"net{rank}", os.readlink("/proc/self/ns/net"))
    if rank == 1:
        wait_for("net0")
        sys.exit("the cause")
    hang()
    """
    result = run(job, body)
    assert (result.exit_code, result.failed_rank) == (1, 1)
    assert keepers(os.getpid()) == []
    wait_until_gone({(job.folder / f"net{rank}").read_text() for rank in range(2)})


@needs_namespaces
def test_a_program_that_is_not_there_is_a_failed_rank(job: Job) -> None:
    result = launch_job(["/nowhere/python"], cluster(), 1, job.logs, on_line=lambda *_: None, grace=QUICK)
    assert (result.ok, result.failed_rank) == (False, 0)
    assert "/nowhere/python" in result.reason
    assert keepers(os.getpid()) == []


@needs_namespaces
def test_a_network_that_cannot_be_made_starts_nothing(job: Job, monkeypatch) -> None:
    def refuse(*_):
        raise UserError("cluster=emulated: no")

    monkeypatch.setattr(emulated, "Network", refuse)
    with pytest.raises(UserError, match=r"^cluster=emulated: no$"):
        run(job, WAIT)
    assert not list(job.folder.glob("*.pid"))


@pytest.fixture
def program(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(job.folder), *job.script(WAIT)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield process
    process.kill()
    process.wait(DEADLINE)


@needs_namespaces
@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGINT] * 2, 130), ([signal.SIGTERM], 143), ([signal.SIGKILL], -9)],
    ids=["Ctrl-C", "Ctrl-C twice", "SIGTERM", "kill -9"],
)
def test_however_the_launcher_ends_nothing_is_left(job: Job, program, signals, code) -> None:
    pids = [job.noted(f"{name}{rank}.pid") for name in ("", "child") for rank in range(2)]
    held = keepers(program.pid)
    found = namespaces([*held, *pids])
    assert len(found) == 3
    for number in signals:
        program.send_signal(number)
        if number is not signals[-1]:
            time.sleep(0.3)  # sooner, it would count as the same Ctrl-C
    assert program.wait(DEADLINE) == code
    wait_until(lambda: not any(map(alive, [*held, *pids])), "all processes to end")
    wait_until_gone(found)


def test_what_validation_runs_and_what_it_compares_with() -> None:
    single, everyone, towards = make_patterns([1e9] * 3)
    assert (single.flows, single.links, single.rate) == ([(0, 1)], [[0]], 1e9)
    assert everyone.flows == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert everyone.links == [[0, 1], [2, 4], [2, 3], [0, 5], [4, 5], [1, 3]]  # out of and into each node
    assert (towards.flows, towards.links, towards.rate) == ([(1, 0), (2, 0)], [[0, 1]], 1e9)


def test_validation_of_uneven_links_looks_at_the_slow_ones() -> None:
    *singles, everyone, towards = make_patterns([1e9, 1e8, 1e9])
    assert [(p.flows, p.rate) for p in singles] == [([(0, 1)], 1e8), ([(1, 2)], 1e8), ([(2, 0)], 1e9)]
    assert (everyone.links, everyone.rate) == ([[2, 3], [0, 5]], 1e8)
    assert towards.rate == 1e9
    assert make_patterns([1e9, 1e8, 1e8])[-1].rate == 2e8  # the senders' links are the limit


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "dilation"), [(2, 1.0), (4, 10.0)])
def test_links_carry_what_the_config_says(tmp_path, nodes, dilation) -> None:
    """At a rate that a busy machine can still do."""
    job, measured = measure(
        cluster(nodes=nodes, bandwidth=f"{50 * dilation}mbit", time_dilation=dilation), 2.0, tmp_path
    )
    assert job.ok
    for row in measured:
        assert row.goodput * HEADERS / (50e6 * dilation) == pytest.approx(1.0, abs=0.05), row
        assert row.holds


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_gives_the_same_bits_as_on_this_host(tmp_path) -> None:
    same = ["comm=hybrid", "comm.rule=paper", "comm.sparse=never"]  # what is measured at start would choose otherwise
    local = train(tmp_path, "cluster=local", *same)
    emulated_one = train(tmp_path, "cluster=emulated", "cluster.bandwidth=250mbit", *same)
    assert emulated_one["replica_digests"] == local["replica_digests"]
    assert (local["degree"], emulated_one["degree"]) == ("real", "emulated")
    assert emulated_one["bytes_sent_per_iteration"] == local["bytes_sent_per_iteration"]


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("comm", ["ddp", "single"])
def test_the_references_train_there_too(tmp_path, comm) -> None:
    summary = train(tmp_path, "cluster=emulated", "+cluster.node_bandwidth.0=100mbit", f"comm={comm}")
    assert len(set(summary["replica_digests"])) == 1
    assert summary["not_emulated"] == []


def train(folder: Path, *overrides: str) -> dict:
    run_dir = folder / str(len(list(folder.iterdir())))
    rest = ["trainer.epochs=null", "trainer.iterations=5", "trainer.checkpoint=false", "tracking.mlflow=false"]
    command = [sys.executable, "-m", "poseidon", "train", *overrides, *rest, f"hydra.run.dir={run_dir}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    return summary
