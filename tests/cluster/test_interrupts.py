"""Signals to the launcher, and its death. Each test runs it as a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import DEADLINE, Job, alive, wait_until

ROOT = Path(__file__).parents[2]
DRIVER = """
import signal, sys
from pathlib import Path
from poseidon.cluster import Grace, launch_job
from poseidon.config.schema import ClusterConfig
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell start with it ignored
here = Path(sys.argv[1])
grace = Grace(interrupt=float(sys.argv[2]), linger=0.3)
result = launch_job(sys.argv[3:], ClusterConfig(), 2, here / "logs", env={"HERE": str(here)}, grace=grace)
print("result", result.status, result.reason, flush=True)
sys.exit(result.exit_code)
"""


class Program:
    """The driver above with ranks that run ``body``."""

    def __init__(self, job: Job, body: str, interrupt: float) -> None:
        self.job = job
        self.errors = job.folder / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(job.folder), str(interrupt), *job.script(body)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ranks(self) -> list[int]:
        return [self.job.noted(f"{rank}.pid") for rank in range(2)]

    def end(self) -> tuple[int, str, str]:
        out, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, self.errors.read_text()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.process.kill()
        program.process.communicate(timeout=DEADLINE)


def start(programs: list[Program], job: Job, body: str, interrupt: float = 5.0) -> Program:
    program = Program(job, body, interrupt)
    programs.append(program)
    return program


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_one_signal_ends_everything_cleanly(
    job: Job, programs: list[Program], number: int, code: int, name: str
) -> None:
    body = """
    def leave(*_):
        note(f"tidied{rank}")
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    note(f"{rank}.pid")
    while True:
        time.sleep(1)
    """
    program = start(programs, job, body)
    ranks = program.ranks()
    program.process.send_signal(number)
    status, out, err = program.end()
    assert status == code
    assert out == f"result interrupted interrupted by {name}\n"
    assert err == f"interrupted by {name}: ending all ranks (once more: at once)\n"
    assert all((job.folder / f"tidied{rank}").exists() for rank in range(2))
    assert not any(map(alive, ranks))


STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: note(f"asked{rank}"))
child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
note(f"child{rank}.pid", subprocess.Popen([sys.executable, "-S", "-c", child]).pid)
note(f"{rank}.pid")
while True:
    time.sleep(1)
"""


def test_ctrl_c_twice_ends_everything_at_once(job: Job, programs: list[Program]) -> None:
    program = start(programs, job, STUBBORN, interrupt=60.0)
    pids = program.ranks() + [job.noted(f"child{rank}.pid") for rank in range(2)]
    program.process.send_signal(signal.SIGINT)
    for rank in range(2):
        job.noted(f"asked{rank}")
    assert program.process.poll() is None
    time.sleep(0.3)  # sooner, it would count as the same Ctrl-C
    program.process.send_signal(signal.SIGINT)
    status, _, err = program.end()
    assert status == 130
    assert len(err.splitlines()) == 1
    assert not any(map(alive, pids))


def test_ranks_that_do_not_heed_ctrl_c_are_killed_after_a_grace(job: Job, programs: list[Program]) -> None:
    program = start(programs, job, STUBBORN, interrupt=0.5)
    pids = program.ranks() + [job.noted(f"child{rank}.pid") for rank in range(2)]
    program.process.send_signal(signal.SIGINT)
    assert program.end()[0] == 130
    assert not any(map(alive, pids))


def test_kill_9_of_the_launcher_leaves_nothing(job: Job, programs: list[Program]) -> None:
    """The ranks' children included, though nothing of ours runs in them."""
    program = start(programs, job, STUBBORN)
    pids = program.ranks() + [job.noted(f"child{rank}.pid") for rank in range(2)]
    program.process.kill()
    wait_until(lambda: not any(map(alive, pids)), "all processes to end")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_ranks_end_with_the_launcher_even_without_its_keeper(job: Job, programs: list[Program]) -> None:
    body = f"""
    sys.path.insert(0, {str(ROOT)!r})
    from poseidon.cluster.guard import end_with_parent
    end_with_parent()
    note(f"{{rank}}.pid")
    hang()
    """
    program = start(programs, job, body)
    ranks = program.ranks()
    children = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split()
    (keeper,) = set(map(int, children)) - set(ranks)
    os.kill(keeper, signal.SIGKILL)
    program.process.kill()
    wait_until(lambda: not any(map(alive, ranks)), "the ranks to end")


def test_a_rank_that_is_orphaned_already_ends(tmp_path: Path) -> None:
    code = "from poseidon.cluster.guard import end_with_parent; end_with_parent(); print('still here')"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "POSEIDON_LAUNCHER_PID": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=DEADLINE)
    assert (run.returncode, run.stdout) == ((1, b"") if sys.platform == "linux" else (0, b"still here\n"))


def test_a_failure_before_ctrl_c_stays_a_failure(job: Job, programs: list[Program]) -> None:
    body = """
    note(f"{rank}.pid")
    if rank == 1:
        wait_for("go")
        raise ValueError("the cause")
    while True:
        time.sleep(1)
    """
    program = start(programs, job, body)
    program.ranks()
    (job.folder / "go").touch()
    wait_until(lambda: "ValueError" in program.errors.read_text(), "the failure to be shown")
    program.process.send_signal(signal.SIGINT)
    status, out, _ = program.end()
    assert (status, out) == (1, "result failed rank 1 failed with exit code 1: ValueError: the cause\n")
