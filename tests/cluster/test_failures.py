"""A rank fails: all end, soon, and one line names the right one."""

from __future__ import annotations

import pytest

from poseidon.cluster import Grace

from .conftest import QUICK, Job, alive


def test_traceback_once_and_reason_names_rank(job: Job) -> None:
    result = job.run("if rank == 1: raise ValueError('too bad')\nwait_for('never')", 3)
    assert (result.ok, result.status, result.interrupted) == (False, "failed", False)
    assert (result.exit_code, result.failed_rank) == (1, 1)
    assert result.reason == "rank 1 failed with exit code 1: ValueError: too bad"
    assert result.exit_codes == (-15, 1, -15)
    assert job.shown().count("Traceback (most recent call last):") == 1
    assert job.shown().count("ValueError: too bad") == 1
    assert job.lines[-1] == (-1, "launcher", f"{result.reason} ({job.logs / 'rank1.log'})")
    assert b"ValueError: too bad" in job.log(1)


def test_same_bug_on_all_ranks_is_shown_once(job: Job) -> None:
    result = job.run("raise ValueError('everywhere')", 3)
    assert result.exit_code == 1
    assert job.shown().count("ValueError: everywhere") == 1
    assert all(b"ValueError: everywhere" in job.log(rank) for rank in range(3))


@pytest.mark.parametrize("world_size", [1, 3])
def test_users_mistake_is_one_line(job: Job, world_size: int) -> None:
    result = job.run("print('poseidon: no such file: x', file=sys.stderr); sys.exit(2)", world_size)
    assert result.exit_code == 2
    assert result.reason.endswith("could not go on: poseidon: no such file: x")
    assert job.shown() == ["poseidon: no such file: x"]


def test_users_mistakes_that_differ_are_all_shown(job: Job) -> None:
    job.run("print(f'poseidon: no such file: {rank}', file=sys.stderr); sys.exit(2)")
    assert sorted(job.shown()) == [f"poseidon: no such file: {rank}" for rank in range(2)]


def test_kill_9_of_a_rank(job: Job) -> None:
    """The others hang on; with the real graces all is over well within 15 seconds."""
    result = job.run(
        """
        note(f"{rank}.pid")
        if rank == 1:
            wait_for("0.pid")
            os.kill(os.getpid(), signal.SIGKILL)
        hang()
        """,
        grace=Grace(),
    )
    assert result.reason == "rank 1 was killed by SIGKILL (killed by hand, or for lack of memory)"
    assert (result.exit_code, result.failed_rank, result.exit_codes) == (137, 1, (-15, -9))
    assert job.seconds < 10
    assert not any(alive(job.noted(f"{rank}.pid")) for rank in range(2))


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(job: Job) -> None:
    result = job.run(
        """
        if rank == 1:
            wait_for("child.pid")
            sys.exit("gone")
        signal.signal(signal.SIGTERM, lambda *_: note("asked"))
        child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        note("child.pid", subprocess.Popen([sys.executable, "-S", "-c", child]).pid)
        while True:
            time.sleep(1)
        """
    )
    assert (job.folder / "asked").exists()
    assert result.exit_codes == (-9, 1)
    assert result.reason == "rank 1 failed with exit code 1: gone"
    assert not alive(job.noted("child.pid"))


def test_ranks_that_lost_a_peer_do_not_hide_which(job: Job) -> None:
    """They end first, with tracebacks, while the one that failed takes its time to exit."""
    result = job.run(
        """
        import atexit
        if rank == 2:
            atexit.register(wait_for, "0")
            atexit.register(wait_for, "1")
            raise KeyError("the cause")
        atexit.register(note, str(rank))
        print("lost rank 2", file=sys.stderr)
        try:
            raise ConnectionError("reset")
        except ConnectionError:
            import traceback
            traceback.print_exc()
        sys.exit(75)
        """,
        3,
        grace=Grace(),
    )
    assert result.exit_codes == (75, 75, 1)
    assert (result.failed_rank, result.reason) == (2, "rank 2 failed with exit code 1: KeyError: 'the cause'")
    assert job.shown().count("Traceback (most recent call last):") == 1
    assert not any("ConnectionError" in line for line in job.shown())
    assert b"ConnectionError: reset" in job.log(0)


def test_earlier_traceback_outweighs_earlier_exit(job: Job) -> None:
    """A peer that fails because of it, with a code of its own, may well be faster to exit."""
    result = job.run(
        """
        import atexit
        if rank == 1:
            atexit.register(wait_for, "other")
            atexit.register(note, "failed")  # runs after the traceback is out
            raise KeyError("the cause")
        wait_for("failed")
        atexit.register(note, "other")
        raise RuntimeError("connection closed by peer")
        """,
    )
    assert result.failed_rank == 1
    assert job.shown().count("Traceback (most recent call last):") == 1
    assert not any("connection closed" in line for line in job.shown())


def test_a_failed_rank_that_hangs_at_exit_is_still_the_cause(job: Job) -> None:
    result = job.run(
        """
        import atexit
        if rank == 1:
            atexit.register(hang)
            atexit.register(note, "failed")
            raise KeyError("the cause")
        wait_for("failed")
        sys.exit(75)
        """,
    )
    assert result.failed_rank == 1
    assert result.reason == "rank 1 failed and had to be ended: KeyError: 'the cause'"
    assert "KeyError: 'the cause'" in job.shown(1)


def test_only_lost_peers(job: Job) -> None:
    result = job.run("print('rank 1 closed its connections', file=sys.stderr); sys.exit(0 if rank else 75)")
    assert (result.exit_code, result.failed_rank) == (75, None)
    assert result.reason == "rank 0 said: rank 1 closed its connections"


def test_the_rank_that_all_others_lost_and_that_never_ended(job: Job) -> None:
    result = job.run("hang() if rank == 1 else sys.exit(75)", 3)
    assert (result.exit_code, result.failed_rank, result.exit_codes) == (75, 1, (75, -15, 75))
    assert result.reason == "rank 1 did not end by itself; rank 0 said: another rank was lost" or (
        result.reason == "rank 1 did not end by itself; rank 2 said: another rank was lost"
    )


def test_a_traceback_that_a_rank_lives_down_is_shown(job: Job) -> None:
    result = job.run(
        """
        import logging
        try:
            raise OSError("passing")
        except OSError:
            logging.exception("trying again")
        (here / "seen").exists() or wait_for("seen")
        """,
        1,
        on_line=lambda *line: (
            job.lines.append(line),
            "OSError: passing" in line and job.folder.joinpath("seen").touch(),
        ),
        grace=QUICK,
    )
    assert result.ok
    assert job.shown(0)[-1] == "OSError: passing"
