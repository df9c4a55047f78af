"""From a case to runs: each variant's config, typed and checked, before anything starts."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poseidon.bench.suite import Case
from poseidon.config import to_plain
from poseidon.config.check import check_train
from poseidon.config.compose import CommandLine, compose, jobs
from poseidon.config.schema import AUTO, ClusterKind, TrainConfig
from poseidon.emulation.host import find_host
from poseidon.errors import UserError

#: Of every run, before the case's own: nothing but speed is wanted.
_FIRST = ("trainer=throughput",)


@dataclass(frozen=True, eq=False)
class Run:
    """A training to be run.

    Attributes:
        overrides: that make the config.
    """

    config: TrainConfig
    overrides: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the config, but for where it is tracked."""
        plain = {key: part for key, part in to_plain(self.config).items() if key != "tracking"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def command(self) -> str:
        return shlex.join(["poseidon", "train", *self.overrides])

    def shortened(self, iterations: int) -> Run:
        """With so few iterations, if it has more."""
        trainer = self.config.trainer
        if trainer.iterations is not None and trainer.iterations <= iterations:
            return self
        config = replace(self.config, trainer=replace(trainer, iterations=iterations))
        return Run(config, (*self.overrides, f"trainer.iterations={iterations}"))

    def with_factor(self, factor: float) -> Run:
        """With a number for cluster.time_dilation=auto."""
        from poseidon.training.dilation import with_factor

        if self.config.cluster.time_dilation != AUTO:
            return self
        config = with_factor(self.config, factor)
        return Run(config, (*self.overrides, f"cluster.time_dilation={config.cluster.time_dilation:g}"))


@dataclass(frozen=True)
class Plan:
    """The runs of a case.

    Attributes:
        variants: by name; several alternatives where the fastest is to be chosen.
        picked: what is to be said of the time dilation; None if none was asked for.
    """

    case: Case
    variants: dict[str, list[Run]]
    picked: str | None = None

    @property
    def emulated(self) -> bool:
        return any(run.config.cluster.name is ClusterKind.emulated for runs in self.variants.values() for run in runs)

    def obstacle(self) -> str | None:
        """Why this machine cannot run the case; None if it can."""
        if self.emulated:
            try:
                find_host()
            except UserError as error:
                return str(error)
        return None

    def in_dilation(self) -> Plan:
        """With one time dilation for all variants that leave it to us: what the most demanding of them needs.

        Raises:
            UserError: a model cannot be built, or its hardware does not tell its time.
        """
        from poseidon.training.dilation import pick

        picked = pick([run.config for runs in self.variants.values() for run in runs])
        if picked is None:
            return self
        variants = {name: [run.with_factor(picked.factor) for run in runs] for name, runs in self.variants.items()}
        return replace(self, variants=variants, picked=str(picked))


def make_plan(case: Case) -> Plan:
    """Raises UserError, naming case and variant, if a config cannot run."""
    return Plan(case, {name: list(_runs(case, name, overrides)) for name, overrides in case.variants.items()})


def _runs(case: Case, variant: str, overrides: Sequence[str]) -> Iterator[Run]:
    last = (f"trainer.iterations={case.iterations}", f"trainer.warmup={case.warmup}", "tracking.mlflow=false")
    line = CommandLine("train", [*_FIRST, *case.overrides, *overrides, *last], multirun=True)
    try:
        for job in jobs(line):
            config: Any = compose("train", job)
            check_train(config)
            yield Run(config, tuple(job))
    except UserError as error:
        raise UserError(f"case {case.name}, variant {variant}: {error}") from error
