"""Runs the cases of a suite: every variant once per round, round after round, so that what is compared are neighbours.

Rounds go forth and back (A B C, C B A ...): a machine that gets slower while it goes on favours nobody. What has been
measured is not measured again, so that a bench that was interrupted goes on where it was.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from poseidon.bench.plan import Plan, Run, make_plan
from poseidon.bench.records import CHOICE, Record, Store
from poseidon.bench.results import CaseResult, collect
from poseidon.bench.suite import Case, Suite
from poseidon.config import to_plain
from poseidon.errors import UserError
from poseidon.reporting.bounds import busy_seconds
from poseidon.reporting.runs import Run as Told
from poseidon.tracking import content
from poseidon.training.job import run_job

#: Of a summary, what is long and has nothing to do with speed.
_LEFT_OUT = ("schemes", "overrides", "mlflow")
_SIGNALLED = (129, 130, 143)
#: Timed iterations of a run that only helps to choose.
TRIAL = 5


class Interrupted(Exception):
    """A signal has ended a run: the rest is not wanted either.

    Attributes:
        exit_code: for the calling process.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class Bench:
    """All cases of a suite.

    Args:
        folder: for the records.
        fresh: forget what they say of these cases.

    Raises:
        UserError: a config cannot run, nothing can be run here, or the folder cannot be used; nothing has been started.
    """

    def __init__(self, suite: Suite, folder: Path, console: Console, *, fresh: bool = False) -> None:
        self._folder, self._console = folder, console
        self._plans = [make_plan(case) for case in suite.chosen]
        obstacles = {plan.case.name: plan.obstacle() for plan in self._plans}
        if all(obstacles.values()):
            raise UserError(f"suite {suite.name}: {next(iter(obstacles.values()))}")
        self._notes = {name: [f"left out: {why}"] if why else [] for name, why in obstacles.items()}
        self._store = Store(folder)
        if fresh:
            self._store.forget({case.name for case in suite.chosen})
        self._results = {
            case.name: collect(self._store, case, notes=self._notes.get(case.name, ())) for case in suite.cases
        }

    @property
    def results(self) -> list[CaseResult]:
        """Of all cases of the suite, also those that are not run now."""
        return list(self._results.values())

    @property
    def records(self) -> list[Record]:
        """Of the suite's cases, older ones included."""
        return [record for record in self._store.records if record.case in self._results]

    @property
    def failures(self) -> int:
        """Cases that could not be measured in whole."""
        return sum(bool(notes) for notes in self._notes.values())

    def run(self) -> Iterator[CaseResult]:
        """Gives a case after each round of its runs.

        Raises:
            Interrupted: by a signal; what has been measured is kept.
        """
        for plan in self._plans:
            if self._notes[plan.case.name]:
                self._say(f"{plan.case.name}: {self._notes[plan.case.name][0]}")
                continue
            self._say(f"{plan.case.name}: {plan.case.what}")
            yield from self._case(plan)

    def _case(self, plan: Plan) -> Iterator[CaseResult]:
        case = plan.case
        plan = plan.in_dilation()
        if plan.picked:
            self._say(f"  {plan.picked}")
        runs, chosen = self._chosen(plan)
        digests = {name: run.digest for name, run in runs.items()}
        todo = list(dict.fromkeys(digests.values()))
        for round_ in range(1, case.pairs + 1):
            for digest in todo if round_ % 2 else todo[::-1]:
                names = [name for name in runs if digests[name] == digest]
                words = f"round {round_}/{case.pairs}"
                try:
                    done = self._measured(case, names, runs[names[0]], round_, words, chosen)
                finally:
                    self._results[case.name] = collect(self._store, case, digests, self._notes[case.name])
                if not done:
                    todo = [other for other in todo if other != digest]
            self._say_left(case, todo, case.pairs - round_)
            yield self._results[case.name]

    def _say_left(self, case: Case, todo: Sequence[str], rounds: int) -> None:
        """How long the case's other rounds will take, as far as they have not been run before."""
        ahead = range(case.pairs - rounds + 1, case.pairs + 1)
        left = 0.0
        for digest in todo:
            done = self._store.completed(case.name, digest)
            left += sum(round_ not in done for round_ in ahead) * list(done.values())[-1].seconds
        if left > 60:
            self._say(f"  about {left / 60:.0f} minutes left for this case")

    def _chosen(self, plan: Plan) -> tuple[dict[str, Run], dict[str, str]]:
        """The run that stands for each variant, and of those with alternatives, what the fastest has of its own."""
        runs, words = {}, {}
        for name, alternatives in plan.variants.items():
            if len(alternatives) == 1:
                runs[name] = alternatives[0]
                continue
            speeds = {run: self._trial(plan.case, name, run, _own(run, alternatives)) for run in alternatives}
            fastest = max(speeds, key=lambda run: speeds[run])
            if speeds[fastest] > 0:
                runs[name], words[name] = fastest, _own(fastest, alternatives)
        return runs, words

    def _trial(self, case: Case, variant: str, run: Run, words: str) -> float:
        """Images per second of a short run of an alternative; 0 if it failed."""
        run = run.shortened(case.warmup + TRIAL)
        if not self._measured(case, [variant], run, CHOICE, words, {}):
            return 0.0
        return self._store.completed(case.name, run.digest)[CHOICE].value("images_per_second") or 0.0

    def _measured(
        self, case: Case, variants: Sequence[str], run: Run, round_: int, words: str, chosen: Mapping[str, str]
    ) -> bool:
        """Runs it, unless it has been. False: it failed, which is noted."""
        if round_ in self._store.completed(case.name, run.digest):
            return True
        record = self._execute(case, variants, run, round_, {name: chosen[name] for name in variants if name in chosen})
        what = f"{', '.join(variants)}, {words}"
        if record.completed:
            self._say(f"  {what}: {record.iteration:.4g} s per iteration ({record.seconds:.0f} s)")
            return True
        note = f"{what}: failed: {record.error} ({self._failed(case, variants)}; {run.command})"
        self._notes[case.name].append(note)
        self._say(f"  {note}")
        return False

    def _execute(self, case: Case, variants: Sequence[str], run: Run, round_: int, chosen: Mapping[str, str]) -> Record:
        began = time.monotonic()
        with TemporaryDirectory(prefix="poseidon-bench-") as scratch:
            outcome = run_job(run.config, run.overrides, Path(scratch) / "run", quiet=True)
            if outcome.exit_code in _SIGNALLED:
                raise Interrupted(outcome.exit_code)
            summary = {key: value for key, value in outcome.summary.items() if key not in _LEFT_OUT}
            record = Record(
                case=case.name,
                variants=variants,
                digest=run.digest,
                round=round_,
                chosen=chosen,
                command=run.command,
                seconds=time.monotonic() - began,
                busy=busy_seconds(_told(run, summary)),
                summary=summary,
            )
            self._store.add(record)
            if not record.completed:
                shutil.rmtree(self._failed(case, variants), ignore_errors=True)
                shutil.copytree(outcome.run_dir, self._failed(case, variants))
        return record

    def _failed(self, case: Case, variants: Sequence[str]) -> Path:
        """Where the records of a failed run are kept."""
        return self._folder / "failed" / f"{case.name}-{variants[0]}"

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def _told(run: Run, summary: dict[str, Any]) -> Told:
    return Told("", "", str(summary["status"]), summary["error"], summary, content.params(to_plain(run.config)))


def _own(run: Run, alternatives: Sequence[Run]) -> str:
    """The overrides that a run has and not all alternatives have, without their keys' groups."""
    others = [set(other.overrides) for other in alternatives]
    own = [o.partition("=") for o in run.overrides if not all(o in other for other in others)]
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in own)
