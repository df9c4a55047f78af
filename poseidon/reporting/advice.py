"""Which command makes what a report lacks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from poseidon.reporting.runs import Run
from poseidon.reporting.sections import Section
from poseidon.reporting.variants import comm_order

#: Overrides that say how a run communicates, where it is kept, or what it goes on with.
_OF_THE_RUN = ("comm", "cluster.nodes", "tracking", "hydra", "trainer.global_batch", "trainer.resume", "seed")


def baseline_command(section: Section, experiment: str, uri: str | None = None) -> str:
    """The ``poseidon train`` line that makes a section's baseline, from the overrides of one of its runs.

    Args:
        uri: of the run store, if it was given on the command line.
    """
    others = [run for run in section.runs if run.comm != "single"] or section.runs
    model = min(others, key=lambda run: (comm_order(run.comm), run.nodes, run.whole("seed")))
    seeds = sorted({run.whole("seed") for run in others if run.comm == model.comm and run.nodes == model.nodes})
    kept = [*_kept(model), f"seed={','.join(map(str, seeds))}"] if seeds != [0] else _kept(model)
    return train_command(["comm=single", *kept], experiment, uri, sweep=len(seeds) > 1)


def more_nodes_command(section: Section, experiment: str, uri: str | None = None) -> str:
    """The line that makes something to compare a single machine with."""
    return train_command(
        ["comm=ddp,ps,hybrid", "cluster.nodes=1,2", *_kept(section.first)], experiment, uri, sweep=True
    )


def train_command(overrides: Sequence[str], experiment: str, uri: str | None = None, *, sweep: bool = False) -> str:
    store = [f"tracking.uri={_value(uri)}"] if uri else []
    words = [*(["-m"] if sweep else []), *overrides, f"tracking.experiment={_value(experiment)}", *store]
    return f"poseidon train {shlex.join(words)}"


def _value(text: str) -> str:
    """In Hydra's quotes if its grammar would read a sign of it as its own."""
    if re.fullmatch(r"[\w./:@-]+( [\w./:@-]+)*", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _kept(run: Run) -> list[str]:
    """A run's overrides that also hold for another way of communicating."""
    kept = []
    for override in run.overrides:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        if not any(key == name or key.startswith(f"{name}.") for name in _OF_THE_RUN):
            kept.append(override)
    return kept
