"""What tells runs apart: which of their differences make another setting, another curve, or a mere repeat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

from poseidon.reporting.emulated import hardware_params, papers_name
from poseidon.reporting.runs import Run

#: From left to right in every table and legend; others follow by name.
COMMS = ("single", "ddp", "fsdp", "downpour", "ps", "project_adam", "sfb", "block", "hybrid")
#: Keys that change neither speed nor result, or that are axes of their own.
_NEVER = ("tracking.", "comm.name", "comm.timeout", "comm.encryption", "cluster.nodes", "cluster.threads")
#: Params that are no config keys: what the run really had of axes of their own.
_HAD = ("nodes", "global_batch")
_NEVER_TRAINER = tuple(
    f"trainer.{name}" for name in ("batch_size", "global_batch", "resume", "checkpoint", "log_every", "eval_")
)
#: Of emulated networks and slow nodes, which are a setting of their own (:func:`poseidon.reporting.emulated.link` and
#: ``straggler``), and of hardware.
_NEVER_CLUSTER = tuple(
    f"cluster.{name}" for name in ("bandwidth", "node_bandwidth", "latency", "straggler.", "time_dilation")
)
_NEVER_HARDWARE = ("hardware",)
#: Where accelerators are emulated, nothing is learnt, and one iteration is like another.
_NEVER_ASLEEP = ("trainer.iterations", "trainer.epochs", "schedule.", "optimizer.lr")
#: Of more than one process.
_OF_SEVERAL = ("cluster.devices_per_node", "cluster.servers", "cluster.batch_shares")
#: Said whenever runs differ in them, even where comm tells the runs apart.
_ALWAYS = ("comm.overlap", "comm.rule")
_SETTING = ("model.", "dataset.", "device", "trainer.accumulate")
_NOT_SETTING = ("model.weights", "dataset.root")


def comm_order(comm: str) -> tuple[int, str]:
    return (COMMS.index(comm) if comm in COMMS else len(COMMS), comm)


def curve_order(run: Run) -> tuple[int, str, bool]:
    """By comm; of the papers' ablation, which adds one thing after another, the first step first."""
    return (*comm_order(run.comm), run.comm == "ps" and bool(papers_name(run)) and run.text("overlap") != "none")


def relevant(key: str, run: Run) -> bool:
    """Whether a config key of this run can have had an influence on its speed or result."""
    if key.startswith((*_NEVER, *_NEVER_TRAINER)) or key.endswith("seed") or key in _HAD:
        return False
    if key.startswith((*_NEVER_CLUSTER, *_NEVER_HARDWARE)) or (run.emulated and key == "cluster.name"):
        return False
    if run.sleeps and key.startswith(_NEVER_ASLEEP):
        return False
    if run.comm == "single" and key in _OF_SEVERAL:
        return False
    if not key.startswith("comm."):
        return True
    if run.comm in ("single", "ddp", "fsdp"):
        return (run.comm, key) == ("fsdp", "comm.merge_bytes") or (run.comm == "ddp" and key.startswith("comm.ddp."))
    if run.comm == "downpour" and key == "comm.overlap":
        return False
    return not key.startswith("comm.ddp.") and (key not in ("comm.rule", "comm.plan") or run.comm == "hybrid")


def setting_params(run: Run) -> dict[str, str]:
    """The config keys that make two runs incomparable: of model, data set, numerics and emulated hardware, less the
    seeds."""
    ours = {
        key: value
        for key, value in run.params.items()
        if key.startswith(_SETTING) and not key.startswith(_NOT_SETTING) and not key.endswith("seed")
    }
    return ours | hardware_params(run)


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """The config keys, sorted, that split the runs of one setting into curves, beside comm, nodes and rows."""
    ours = [_ours(run) for run in runs]
    values: dict[str, set[str]] = {}
    for params in ours:
        for key, value in params.items():
            values.setdefault(key, set()).add(value)
    return sorted(key for key, found in values.items() if len(found) > 1)


def telling_keys(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Those of the differing keys that name the curves: of several that always change together (the epochs and a
    schedule's length) the first alone."""
    ours = [_ours(run) for run in runs]
    kept: list[str] = []
    for key in sorted(keys, key=_preference):
        if key in _ALWAYS or len(_partition(ours, [*kept, key])) > len(_partition(ours, kept)):
            kept.append(key)
    return sorted(kept)


def differences(runs: Iterable[Run]) -> dict[str, dict[str, int]]:
    """Every config key in which runs differ: value -> number of runs."""
    counts: dict[str, dict[str, int]] = {}
    runs = list(runs)
    for key in sorted({key for run in runs for key in run.params}):
        values: dict[str, int] = {}
        for run in runs:
            value = run.params.get(key, "(none)")
            values[value] = values.get(value, 0) + 1
        if len(values) > 1 and not key.startswith("tracking.run_name"):
            counts[key] = dict(sorted(values.items(), key=lambda item: natural(item[0])))
    return counts


def usual(runs: Sequence[Run], keys: Iterable[str]) -> dict[str, str]:
    """Values that most runs have, and that need not be said of each."""
    found = {}
    for key in keys:
        values = [params[key] for params in map(_ours, runs) if key in params]
        for value, count in Counter(values).most_common(1):
            if 2 * count > len(values):
                found[key] = value
    return found


def label(run: Run, keys: Iterable[str], usual: Mapping[str, str], *, rows: int | None = None) -> str:
    """Names a curve: comm, and what else tells it apart; before them the papers' name of it, if it has one.

    Args:
        keys: from :func:`telling_keys`.
        usual: values that are not said, from :func:`usual`.
        rows: per node, if they are not those of the setting.
    """
    theirs = papers_name(run)
    said = [key for key in keys if key in run.params and relevant(key, run) and run.params[key] != usual.get(key)]
    if theirs:  # it says how layers are chosen and what overlaps, in every figure alike
        said = [key for key in said if key not in _ALWAYS]
    extra = [short(key, run.params[key]) for key in said]
    if rows is not None:
        extra.insert(0, f"{rows} rows")
    name = f"{run.comm} ({', '.join(extra)})" if extra else run.comm
    return f"{theirs}: {name}" if theirs else name


def short(key: str, value: Any) -> str:
    return f"{key.rpartition('.')[2]}={value}"


def _ours(run: Run) -> dict[str, str]:
    """The config keys that can tell a run's curve from others."""
    setting = setting_params(run)
    return {key: value for key, value in run.params.items() if relevant(key, run) and key not in setting}


def _partition(ours: Sequence[Mapping[str, str]], keys: Sequence[str]) -> set[tuple[str | None, ...]]:
    return {tuple(params.get(key) for key in keys) for params in ours}


def _preference(key: str) -> tuple[int, str]:
    first = ("comm.overlap", "comm.rule", "comm.", "trainer.", "optimizer.")
    return (next((i for i, prefix in enumerate(first) if key.startswith(prefix)), len(first)), key)


def natural(text: str) -> list[tuple[int, float, str]]:
    """A sorting key by which 3 comes before 10, also within a text."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(0, float(part), "") if number else (1, 0.0, part) for part, number in zip(parts, cycle((0, 1))) if part]
