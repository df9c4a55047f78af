"""What a job does when its ranks do well."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from poseidon.cluster import JobResult, launch_job
from poseidon.config.schema import ClusterConfig

from .conftest import QUICK, Job, alive


def test_all_ranks_end_well(job: Job) -> None:
    result = job.run("print('hello from', rank)", 3)
    assert result == JobResult(True, 0, None, "", False, (0, 0, 0))
    assert result.status == "completed"
    assert sorted(job.lines) == [(r, "stdout", f"hello from {r}") for r in range(3)]
    assert [job.log(r) for r in range(3)] == [b"hello from %d\n" % r for r in range(3)]


def test_environment(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("POSEIDON_STORE_FD", "17")
    monkeypatch.setenv("FROM_OUTSIDE", "kept")
    monkeypatch.setenv("RANK", "7")
    cluster = ClusterConfig(threads=3)
    argv = job.script("import json; print(json.dumps(dict(os.environ)))")
    result = launch_job(
        argv,
        cluster,
        2,
        job.logs,
        env={"HERE": str(job.folder), "OMP_NUM_THREADS": "99", "ADDED": "1"},
        on_line=lambda *line: job.lines.append(line),
    )
    assert result.ok
    first, second = (json.loads(job.log(rank)) for rank in range(2))
    for rank, env in enumerate((first, second)):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]) == ("3", "3")
        assert (env["FROM_OUTSIDE"], env["ADDED"], env["PYTHONUNBUFFERED"]) == ("kept", "1", "1")
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        if sys.platform == "linux":
            assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["POSEIDON_STORE_FD"] != "17"
    assert second["POSEIDON_STORE_FD"] == "-1"


def test_rank_0_inherits_a_socket_that_listens_where_the_others_look(job: Job) -> None:
    result = job.run(
        """
        import socket
        if rank == 0:
            server = socket.socket(fileno=int(os.environ["POSEIDON_STORE_FD"]))
            assert server.getsockname() == (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            peer, _ = server.accept()
            peer.sendall(b"found you")
        else:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10)
            print(peer.recv(100).decode())
        """
    )
    assert result.ok
    assert job.shown(1) == ["found you"]


def test_ranks_have_a_session_of_their_own_and_no_input(job: Job) -> None:
    assert job.run("print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))").ok
    assert set(job.shown()) == {"True ''"}


def test_default_terminal_prefixes_lines(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    result = job.run("print('out'); print('err', rank, file=sys.stderr); sys.exit(3 * rank)", on_line=None)
    assert not result.ok
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    *lines, last = err.splitlines()
    assert sorted(lines) == ["[rank 0] err 0", "[rank 1] err 1"]
    assert last == f"rank 1 failed with exit code 3: err 1 ({job.logs / 'rank1.log'})"


def test_works_outside_the_main_thread(job: Job) -> None:
    results: list[JobResult] = []
    thread = threading.Thread(target=lambda: results.append(job.run("print('hello')")))
    thread.start()
    thread.join(20)
    assert [result.ok for result in results] == [True]


def test_what_a_rank_started_does_not_outlive_it(job: Job) -> None:
    """Not even when it holds the rank's output open, ignores SIGTERM and has a process group of its own."""
    result = job.run(
        """
        child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
        start = subprocess.Popen([sys.executable, "-S", "-c", child], process_group=0 if rank else None)
        note(f"child{rank}.pid", start.pid)
        print("last words of", rank)
        """
    )
    assert result.ok
    assert job.seconds < 10
    assert not any(alive(job.noted(f"child{rank}.pid")) for rank in range(2))
    assert {f"last words of {rank}" for rank in range(2)} <= set(job.shown())


def test_a_process_that_left_the_session_cannot_hang_the_job(job: Job) -> None:
    result = job.run(
        """
        child = "import time; time.sleep(30)"
        note("child.pid", subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=True).pid)
        print("without newline", end="")
        """,
        1,
    )
    assert result.ok
    assert job.seconds < 10
    assert job.shown(0) == ["without newline"]


def test_a_rank_that_cannot_be_started_fails_the_job(job: Job, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-program")
    result = launch_job([missing], ClusterConfig(), 2, job.logs, on_line=lambda *line: job.lines.append(line))
    assert (result.ok, result.failed_rank) == (False, 0)
    assert result.exit_code != 0
    assert result.reason == f"rank 0 could not be started: {missing}: No such file or directory"
    assert job.shown() == [result.reason]


def test_an_error_of_the_caller_ends_the_ranks(job: Job) -> None:
    def broken(rank: int, stream: str, text: str) -> None:
        raise RuntimeError("broken terminal")

    with pytest.raises(RuntimeError, match="broken terminal"):
        job.run("note(f'{rank}.pid'); print('hello') if rank == 0 else None; hang()", on_line=broken)
    for rank in range(2):
        if (job.folder / f"{rank}.pid").exists():
            assert not alive(job.noted(f"{rank}.pid"))


def test_two_jobs_at_once(job: Job) -> None:
    """Both inherit sockets and neither holds the other's pipes open."""
    argv = job.script("print('hello', rank)")
    results: list[JobResult] = []

    def run(number: int) -> None:
        env = {"HERE": str(job.folder)}
        logs = job.folder / str(number)
        results.append(launch_job(argv, ClusterConfig(), 2, logs, env=env, on_line=print, grace=QUICK))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [result.ok for result in results] == [True] * 3
