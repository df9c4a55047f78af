"""Runs one job: starts its ranks, shows and keeps their output, and sees to it that all of them end.

    result = launch_job([sys.executable, "-m", "poseidon.training.worker", spec], config.cluster, 4, logs)

One thread does it all, in a loop that never waits longer than a tick: what it does next depends on the
clock and on what has ended so far, never on a rank's cooperation. The terminal is told everything it needs
(the failed rank's traceback, once; one line that says which rank failed, or that it was interrupted), so the
caller has nothing to print and only exits with ``JobResult.exit_code``.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from poseidon.cluster.base import Grace, JobResult, Launcher, OnLine, Process, Task
from poseidon.cluster.emulated import EmulatedLauncher
from poseidon.cluster.environment import listening_socket, rank_environment
from poseidon.cluster.interrupts import Interrupts
from poseidon.cluster.local import LocalLauncher
from poseidon.cluster.output import RankOutput
from poseidon.cluster.screen import Screen
from poseidon.cluster.verdict import (
    USER_ERROR_EXIT,
    Ended,
    describe,
    describe_losses,
    first_failure,
    shell_code,
    signal_name,
)
from poseidon.config.schema import ClusterConfig, ClusterKind

_TICK = 0.05  # seconds between looks at the clock and at the processes
_NEVER = float("inf")


def launch_job(
    argv: Sequence[str],
    cluster_cfg: ClusterConfig,
    world_size: int,
    log_dir: Path,
    *,
    env: Mapping[str, str] | None = None,
    on_line: OnLine | None = None,
    launcher: Launcher | None = None,
    grace: Grace | None = None,
) -> JobResult:
    """Run ``world_size`` ranks of ``argv``, and those that only serve, until all have ended, and say how.

    Ctrl-C or SIGTERM asks the ranks to end, a second one kills them at once; both only if this is called
    in the main thread. The death of this process, however it comes, ends the ranks too.

    Args:
        log_dir: made if missing; gets ``rank0.log`` and so on, both streams without prefixes.
        env: additions to this process's environment for every rank.
        on_line: receives what belongs on the terminal, see :data:`poseidon.cluster.base.OnLine`; by
            default it is printed, with ``[rank N]`` in front.
        launcher: instead of the one that ``cluster_cfg.name`` stands for. Closed in any case.

    Raises:
        OSError: ``log_dir`` or a file in it cannot be written. A rank that cannot be started is no
            exception but a failed job.
        UserError: this machine cannot make the cluster; nothing has been started.
    """
    assert world_size >= 1
    log_dir.mkdir(parents=True, exist_ok=True)
    grace = grace or Grace()
    screen = Screen(on_line, grace.hold)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        devices, servers = min(cluster_cfg.devices_per_node, world_size), cluster_cfg.dedicated
        launcher = launcher or _launcher(cluster_cfg, world_size // devices + servers)
        stack.callback(launcher.close)
        for warning in launcher.warnings:
            screen.say(warning)
        emulated = cluster_cfg.name is ClusterKind.emulated
        store = None if emulated else stack.enter_context(listening_socket(world_size + servers))
        base, threads = {**os.environ, **(env or {})}, cluster_cfg.threads
        envs = [
            rank_environment(rank, world_size, devices, base=base, threads=threads, store=store, servers=servers)
            for rank in range(world_size + servers)
        ]
        fds = (store.fileno(),) if store else ()
        tasks = [
            Task(
                rank,
                list(argv),
                env,
                log_dir / f"rank{rank}.log",
                () if rank else fds,
                host=_host(rank, world_size, devices),
            )
            for rank, env in enumerate(envs)
        ]
        with _Job(screen, interrupts, grace) as job:
            failure = job.start(tasks, launcher)
            if store:
                store.close()  # rank 0's alone: whoever calls after its death is refused, not left waiting
            return replace(failure or job.run(), warnings=tuple(launcher.warnings))


def _host(rank: int, world_size: int, devices: int) -> int:
    """The node that a rank belongs on."""
    return rank // devices if rank < world_size else world_size // devices + rank - world_size


def _launcher(cluster: ClusterConfig, nodes: int) -> Launcher:
    return EmulatedLauncher(cluster, nodes) if cluster.name is ClusterKind.emulated else LocalLauncher()


@dataclass
class _Rank:
    task: Task
    process: Process
    output: RankOutput
    status: int | None = None
    ended_at: float = _NEVER
    told: bool = False
    killed: bool = False
    done: bool = False  # its output is all in and its process closed


class _Job:
    """The loop and its state. Leaving the context kills and closes whatever is still there."""

    def __init__(self, screen: Screen, interrupts: Interrupts, grace: Grace) -> None:
        self._screen = screen
        self._interrupts = interrupts
        self._grace = grace
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._ended: list[Ended] = []
        self._cause: Ended | None = None
        self._interrupts_seen = 0
        self._terminate_at = _NEVER
        self._kill_at = _NEVER

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *unused: object) -> None:
        for rank in self._ranks:
            if not rank.done:
                rank.process.kill()
        for rank in self._ranks:
            if not rank.done:
                rank.process.close()
                rank.output.close()
        self._selector.close()

    def start(self, tasks: Sequence[Task], launcher: Launcher) -> JobResult | None:
        """Start all ranks; the job's result at once if one cannot be."""
        for task in tasks:
            try:
                process = launcher.start(task)
            except OSError as error:
                reason = f"rank {task.rank} could not be started: {task.argv[0]}: {error.strerror or error}"
                self._screen.say(reason)
                return JobResult(False, 1, task.rank, reason, False, (None,) * len(tasks))
            try:
                output = RankOutput(process.outputs, task.log, self._shower(task.rank), self._screen.say)
            except OSError:
                process.close()
                raise
            rank = _Rank(task, process, output)
            self._ranks.append(rank)
            for name, fd in process.outputs.items():
                self._selector.register(fd, selectors.EVENT_READ, (rank, name))
        return None

    def run(self) -> JobResult:
        """Loop until every rank has ended and its output is in."""
        while not all(rank.done for rank in self._ranks):
            ready = self._selector.select(_TICK)
            now = time.monotonic()
            self._look_at_processes(now)  # before their output: a peer's complaint comes after the death
            for key, _ in ready:
                rank, name = key.data
                self._read(rank, name, now)
            self._finish_ended(now)
            self._screen.tick([r.task.rank for r in self._ranks if r.status is None], now)
            self._heed_interrupts()
            self._end_overdue(now)
            if now >= self._kill_at + self._grace.abandon:
                break  # the kernel will not let them die (a file system that hangs): not ours to wait for
        return self._result()

    def _shower(self, rank: int) -> Callable[[str, str], None]:
        def show(stream: str, text: str) -> None:
            self._screen.line(rank, stream, text, time.monotonic())

        return show

    def _look_at_processes(self, now: float) -> None:
        for rank in self._ranks:
            if rank.status is not None:
                continue
            rank.status = rank.process.poll()
            if rank.status is None:
                continue
            rank.ended_at = now
            if rank.status != 0:
                self._end_by(now + self._grace.peers, now + self._grace.peers + self._grace.term)

    def _read(self, rank: _Rank, name: str, now: float) -> None:
        if rank.done or name not in rank.output.open:
            return
        fd = rank.output.open[name]
        rank.output.read(name, now)
        if name not in rank.output.open:
            self._selector.unregister(fd)

    def _finish_ended(self, now: float) -> None:
        """Close ranks that have ended once nothing they started can add to their output."""
        for rank in self._ranks:
            rank.output.tick(now)
            if rank.status is None or rank.done:
                continue
            if now < rank.ended_at + self._grace.linger and not rank.killed:
                if rank.process.lingering():
                    continue
            else:
                rank.process.kill()
            for fd in rank.output.open.values():
                self._selector.unregister(fd)
            rank.output.finish(now)
            rank.process.close()
            rank.done = True
            self._settle(rank, now)

    def _settle(self, rank: _Rank, now: float) -> None:
        """Decide whether what the screen holds of an ended rank is to be seen."""
        number, status = rank.task.rank, rank.status
        assert status is not None
        trouble, words = self._screen.trouble(number), self._screen.last_words(number)
        self._ended.append(Ended(number, status, rank.ended_at, trouble, rank.told, words))
        if status == 0:
            self._screen.release(number, now)
        cause = first_failure(self._ended)
        if self._cause is None and cause is not None and not self._earlier_failure_pending(cause):
            self._cause = cause
            if not self._interrupted(cause):
                self._screen.release_failed(cause.rank, now)

    def _earlier_failure_pending(self, cause: Ended) -> bool:
        """Whether a rank that is not done yet may turn out to have failed before ``cause``."""
        for rank in self._ranks:
            trouble = self._screen.trouble(rank.task.rank)
            began = min(rank.ended_at, trouble if trouble is not None else _NEVER)
            if not rank.done and began < cause.since:
                return True
        return False

    def _heed_interrupts(self) -> None:
        for number, when in self._interrupts.received[self._interrupts_seen :]:
            self._interrupts_seen += 1
            if self._interrupts_seen > 1:
                self._end_by(when, when)
                continue
            self._end_by(when, when + self._grace.interrupt)
            if any(rank.status is None for rank in self._ranks):
                self._screen.say(f"interrupted by {_spell(number)}: ending all ranks (once more: at once)")

    def _end_by(self, terminate_at: float, kill_at: float) -> None:
        self._screen.ending = True
        self._terminate_at = min(self._terminate_at, terminate_at)
        self._kill_at = min(self._kill_at, kill_at)

    def _end_overdue(self, now: float) -> None:
        for rank in self._ranks:
            if rank.status is not None:
                continue
            if now >= self._kill_at and not rank.killed:
                rank.told = rank.killed = True
                rank.process.kill()
            elif now >= self._terminate_at and not rank.told:
                rank.told = True
                rank.process.terminate()

    def _interrupted(self, cause: Ended | None) -> bool:
        """Whether an interrupt, not a failure before it, ended the job.

        What ends us (a scheduler, a closing terminal) may signal the ranks directly a moment before.
        """
        if not self._interrupts.received:
            return False
        number, when = self._interrupts.received[0]
        return cause is None or cause.since > when or cause.status == -number

    def _result(self) -> JobResult:
        codes = tuple(rank.status for rank in self._ranks)
        cause = self._cause or first_failure(self._ended)
        if all(code == 0 for code in codes) and not any(rank.told for rank in self._ranks):
            return JobResult(True, 0, None, "", False, codes)
        if self._interrupted(cause):
            number = self._interrupts.received[0][0]
            return JobResult(False, 128 + number, None, f"interrupted by {_spell(number)}", True, codes)
        if cause is not None:
            if cause is not self._cause:
                self._screen.release_failed(cause.rank, time.monotonic())
            result = JobResult(False, shell_code(cause.status), cause.rank, describe(cause), False, codes)
        else:
            suspect, reason = describe_losses(self._ended)
            code = next((shell_code(code) for code in codes if code and code > 0), 1)
            result = JobResult(False, code, suspect, reason, False, codes)
        self._announce(result, cause)
        return result

    def _announce(self, result: JobResult, cause: Ended | None) -> None:
        """Say which rank failed, unless its own one line has said all there is."""
        if cause is not None and cause.status == USER_ERROR_EXIT and cause.trouble is None and cause.words:
            return
        where = self._ranks[result.failed_rank or 0].task.log
        self._screen.say(f"{result.reason} ({where if result.failed_rank is not None else where.parent})")


def _spell(number: int) -> str:
    return "Ctrl-C" if signal_name(number) == "SIGINT" else signal_name(number)
