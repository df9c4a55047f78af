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
#: And those that do not say what it is made of.
_OF_THE_STORE = ("tracking", "hydra", "trainer.resume")


def baseline_command(section: Section, experiment: str, uri: str | None = None) -> str:
    """The ``poseidon train`` line that makes a section's baseline, from the overrides of one of its runs.

    Args:
        uri: of the run store, if it was given on the command line.
    """
    others = [run for run in section.runs if run.comm != "single"] or section.runs
    model = min(others, key=lambda run: (comm_order(run.comm), run.nodes, run.whole("seed")))
    seeds = sorted({run.whole("seed") for run in others if run.comm == model.comm and run.nodes == model.nodes})
    kept = _kept(model, _OF_THE_RUN, section.dilation if section.sleeps else None)
    kept += [f"seed={','.join(map(str, seeds))}"] if seeds != [0] else []
    return train_command(["comm=single", *kept], experiment, uri, sweep=len(seeds) > 1)


def more_nodes_command(section: Section, experiment: str, uri: str | None = None) -> str:
    """The line that makes something to compare a single machine with."""
    kept = _kept(section.first, _OF_THE_RUN, section.dilation if section.sleeps else None)
    return train_command(["comm=ddp,ps,hybrid", "cluster.nodes=1,2", *kept], experiment, uri, sweep=True)


def dilated_command(run: Run, dilation: float, experiment: str, uri: str | None = None) -> str:
    """The line that repeats a run at another time dilation."""
    return train_command(_kept(run, _OF_THE_STORE, dilation), experiment, uri)


def train_command(overrides: Sequence[str], experiment: str, uri: str | None = None, *, sweep: bool = False) -> str:
    store = [f"tracking.uri={_value(uri)}"] if uri else []
    words = [*(["-m"] if sweep else []), *overrides, f"tracking.experiment={_value(experiment)}", *store]
    return f"poseidon train {shlex.join(words)}"


def _value(text: str) -> str:
    """In Hydra's quotes if its grammar would read a sign of it as its own."""
    if re.fullmatch(r"[\w./:@-]+( [\w./:@-]+)*", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _kept(run: Run, without: Sequence[str], dilation: float | None) -> list[str]:
    """A run's overrides that also hold for another run: all but those of some keys.

    Args:
        dilation: of the other run, whatever this one's overrides make of it; None: it cannot be dilated.
    """
    kept = []
    for override in run.overrides:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        if not any(key == name or key.startswith(f"{name}.") for name in (*without, "cluster.time_dilation")):
            kept.append(override)
    return kept if dilation is None else [*kept, f"cluster.time_dilation={dilation:g}"]
