"""Where a report's numbers come from: hosts, versions, commits, seeds, and what differs among the runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from poseidon.reporting.emulated import hardware, straggler
from poseidon.reporting.runs import COMPLETED, Run
from poseidon.reporting.sections import Section
from poseidon.reporting.tables import speed_form
from poseidon.reporting.variants import differences

#: Values of a differing key that are spelled out.
_MOST_VALUES = 8
#: Largest over smallest speed of repeats that is worth a warning.
_SPREAD = 1.5


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(what, value), of completed runs; where these differ, all values with the number of runs."""
    versions = sorted({name for run in runs for name in run.versions})
    return [
        ("host", _counted(run.host.get("name") for run in runs)),
        ("CPU", _counted(run.host.get("cpu") for run in runs)),
        ("cores", _counted(run.host.get("cores") for run in runs)),
        ("memory", _counted(_gigabytes(run.host.get("memory")) for run in runs)),
        ("operating system", _counted(run.host.get("os") for run in runs)),
        ("degree of reality", _counted(run.summary.get("degree") for run in runs)),
        *_emulation(runs),
        ("commit", _counted(_commit(run) for run in runs)),
        ("seeds", ", ".join(sorted({run.text("seed") for run in runs}, key=lambda seed: (len(seed), seed)))),
        *((name, _counted(run.versions.get(name) for run in runs)) for name in versions),
    ]


def warnings(sections: Sequence[Section]) -> list[str]:
    """What a reader should know before believing a comparison of these runs."""
    runs = [run for section in sections for run in section.runs]
    found = []
    speeds = [c.speed for section in sections for c in section.configurations if c.speed]
    worst = max((speed.high / speed.low for speed in speeds), default=1.0)
    if worst >= _SPREAD:
        found.append(
            f"Repeats of the same configuration differ in speed by up to {worst:.1f} x: something else used the "
            f"machines. Believe no speedup before they have been repeated on idle ones."
        )
    if len({run.summary.get("git_commit") for run in runs}) > 1:
        found.append("The runs come from several commits.")
    if any(run.summary.get("git_dirty") for run in runs):
        found.append("Some runs were made with edits that are in no commit.")
    if any(len({str(run.versions.get(name)) for run in runs}) > 1 for name in {n for r in runs for n in r.versions}):
        found.append("The runs were made with different versions of the software.")
    if len({run.host_type for run in runs}) > 1:
        found.append("The runs come from different hosts; no speedup mixes them.")
    if any(run.oversubscribed and not run.sleeps for run in runs):
        found.append("Some runs had more ranks x threads than cores: their speeds say little (°, drawn hollow).")
    if any(run.comm == "downpour" for run in runs):
        found.append(
            "comm=downpour is asynchronous: its replicas differ by nature while they train (what is evaluated is what "
            "all have once every push is applied), and no repeat takes the same way."
        )
    return [*found, *_doubts(runs)]


def _doubts(runs: Sequence[Run]) -> list[str]:
    """Of emulated runs."""
    found = []
    if any(run.oversubscribed and run.sleeps for run in runs):
        found.append(
            "Some emulated runs had more ranks x threads than cores (°, drawn hollow). Accelerators that sleep need "
            "few: the column limit says whether the cores held a run up."
        )
    if any("CPU" in run.bounds and not run.sleeps for run in runs):
        found.append(
            "Some runs that compute on emulated links were limited by this machine's cores (cpu_bound, drawn crossed): "
            "nodes with cores of their own would be faster. Fewer nodes or more cores help."
        )
    if any("CPU" in run.bounds and run.sleeps for run in runs):
        found.append(
            "Some emulated runs were limited by this machine's cores (cpu_bound, drawn crossed): they show this "
            "machine, not the emulated cluster. Fewer nodes, more cores or a higher cluster.time_dilation help."
        )
    if any(straggler(run) for run in runs):
        found.append(
            "In some runs a node was made slow. Speeds follow from the median iteration, which shows little of delays "
            "in fewer than half of the iterations: read curves against seconds."
        )
    if any("engine" in run.bounds for run in runs):
        found.append(
            "In some emulated runs the engine's busiest thread would need over 0.7 of an undilated iteration "
            "(engine_bound, drawn ringed): at f = 1 it could not fill such links."
        )
    return found


def _emulation(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Facts of emulated runs; [] if there are none."""
    if not any(run.emulated for run in runs):
        return []
    costs = (", ".join(run.emulated_costs) or "none" for run in runs)
    return [
        ("emulated costs", _counted(costs)),
        ("emulated hardware", _counted(hardware(run) if run.emulated else "none" for run in runs)),
        ("time dilation f", _counted(f"{run.dilation:g}" for run in runs)),
    ]


def config_differences(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(key, values with the number of runs) of every config key in which the runs differ."""
    return [(key, _listed(values)) for key, values in differences(runs).items()]


def failures(runs: Iterable[Run]) -> list[tuple[str, str, str]]:
    """(run, status, why) of all that is not averaged in."""
    return [(run.name, run.status, run.error or _why(run)) for run in runs if run.status != COMPLETED]


def baselines(section: Section) -> list[str]:
    """What the speedups of a section are relative to."""
    found: dict[str, None] = {}
    for configuration in section.configurations:
        baseline = section.baseline(configuration)
        if baseline is None or configuration.comm == "single":
            continue
        speed, form = baseline.speed, speed_form(baseline.speed.median)
        spread = f" [{form.format(speed.low)}..{form.format(speed.high)}]" if speed.count > 1 else ""
        differs = f", with other {', '.join(baseline.differs)} for want of the same" if baseline.differs else ""
        runs = "1 run" if speed.count == 1 else f"median of {speed.count} runs"
        found[f"{form.format(speed.median)}{spread} images/s ({runs} of comm=single{differs})"] = None
    return list(found)


def _why(run: Run) -> str:
    return "still running, or its machine went down" if run.status == "running" else "no reason recorded"


def _commit(run: Run) -> str | None:
    commit, dirty = run.summary.get("git_commit"), run.summary.get("git_dirty")
    return f"{str(commit)[:12]}{' (edited)' if dirty else ''}" if commit else None


def _gigabytes(value: Any) -> str | None:
    return f"{value / 2**30:.1f} GiB" if isinstance(value, int) else None


def _counted(values: Iterable[Any]) -> str:
    counts: dict[str, int] = {}
    for value in values:
        word = "not known" if value is None else str(value)
        counts[word] = counts.get(word, 0) + 1
    return next(iter(counts)) if len(counts) == 1 else _listed(dict(sorted(counts.items())))


def _listed(counts: dict[str, int]) -> str:
    shown = [f"{value} ({count})" for value, count in list(counts.items())[:_MOST_VALUES]]
    return "; ".join(shown) + (f"; {len(counts) - _MOST_VALUES} more" if len(counts) > _MOST_VALUES else "")
