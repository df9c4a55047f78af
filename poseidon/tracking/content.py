"""What of a run's records goes to MLflow, and under which names: plain data, made from the files in its folder."""

from __future__ import annotations

import getpass
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from poseidon.tracking.where import shown

#: MLflow's limits.
_LONGEST_KEY, _LONGEST_PARAM, _LONGEST_TAG = 250, 6000, 5000
#: mlflow's word for how a run ended, by ours.
STATUS = {"running": "RUNNING", "completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
#: In a line of metrics.jsonl -> metric, while training and after an evaluation.
_TRAIN = {
    "train_loss": "train/loss",
    "lr": "train/lr",
    "epoch": "train/epoch",
    "wall_s": "train/wall_s",
    "images_per_second": "throughput/images_per_second",
    "stall_share": "throughput/stall_share",
    "mb_per_second": "comm/mb_per_second",
}
_EVAL = {
    "eval_accuracy": "eval/accuracy",
    "eval_loss": "eval/loss",
    "epoch": "eval/epoch",
    "wall_s": "eval/wall_s",
}
#: In summary.json -> metric. Of a list with an entry per rank, the largest.
_FINAL = {
    "images_per_second": "throughput/images_per_second_median",
    "stall_seconds": "throughput/stall_seconds",
    "cpu_seconds_per_iteration": "throughput/cpu_seconds_per_iteration",
    "bytes_sent_per_iteration": "comm/bytes_sent_per_iteration",
    "bytes_dense_per_iteration": "comm/bytes_dense_per_iteration",
    "bytes_planned_per_iteration": "comm/bytes_planned_per_iteration",
    "bytes_inside_per_iteration": "comm/bytes_inside_per_iteration",
    "train_seconds": "train/seconds",
    "seconds_to_target": "eval/seconds_to_target",
}


class Point(NamedTuple):
    """A metric's value at an iteration; ``timestamp`` in milliseconds."""

    key: str
    value: float
    timestamp: int
    step: int


def params(config: Mapping[str, Any]) -> dict[str, str]:
    """The config, flattened with dots: ``{"comm.name": "hybrid", ...}``."""
    return {_key(key): _cut(shown(text), _LONGEST_PARAM) for key, text in _flatten(config)}


def tags(summary: Mapping[str, Any], run_dir: str, config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What a run is found by.

    Args:
        run_dir: where the folder was when the run was made.
        config: whose cluster tells the links of an emulated network.
    """
    host = summary.get("host") or {}
    overrides = [str(override) for override in summary.get("overrides") or []]
    found = {
        **source(summary.get("git_commit"), shlex.join(["poseidon", "train", *overrides])),
        "poseidon.kind": "run",
        "poseidon.run_dir": run_dir,
        "poseidon.host": host.get("name"),
        "poseidon.cpu": host.get("cpu"),
        "poseidon.cores": host.get("cores"),
        **{
            f"poseidon.{key}": summary.get(key)
            for key in ("status", "started", "degree", "throughput_only", "oversubscribed", "error")
        },
        **_emulation(summary, config or {}),
    }
    return plain_tags(found)


def _emulation(summary: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What is emulated, ``none`` if nothing is, and what of this machine's was the limit."""
    costs, cluster = summary.get("emulated_costs"), config.get("cluster") or {}
    linked = isinstance(costs, list) and "network" in costs
    return {
        "poseidon.emulated_costs": (", ".join(map(str, costs)) or "none") if isinstance(costs, list) else None,
        "poseidon.bandwidth": cluster.get("bandwidth") if linked else None,
        **{f"poseidon.{key}": summary.get(key) for key in ("hardware", "time_dilation", "cpu_bound", "engine_bound")},
    }


def source(commit: str | None, command: str) -> dict[str, Any]:
    """Tags of MLflow's own that say what ran; a run's description is the command that repeats it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = None
    return {
        "mlflow.source.name": "poseidon train",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": commit,
        "mlflow.user": user,
        "mlflow.note.content": f"`{shown(command)}`",
    }


def plain_tags(values: Mapping[str, Any]) -> dict[str, str]:
    """As text; without what is not known."""
    return {key: _cut(_text(value), _LONGEST_TAG) for key, value in values.items() if value is not None}


def progress(line: str, started: int) -> list[Point]:
    """The points in a line of metrics.jsonl; [] for a line that a crash cut off.

    Args:
        started: of the run, milliseconds.
    """
    try:
        record = json.loads(line)
    except ValueError:
        return []
    step = record.get("iteration") if isinstance(record, dict) else None
    if not isinstance(step, int):
        return []
    names = _EVAL if "eval_accuracy" in record else _TRAIN
    seconds = _number(record.get("wall_s"))
    timestamp = started + round((seconds or 0.0) * 1000)
    return list(_points({metric: record.get(key) for key, metric in names.items()}, timestamp, step))


def final(summary: Mapping[str, Any]) -> list[Point]:
    """The points that a finished run adds, at its last iteration."""
    values = {metric: summary.get(key) for key, metric in _FINAL.items()}
    for name, value in (summary.get("iteration_seconds") or {}).items():
        values[f"throughput/iteration_seconds_{name}"] = value
    for scheme, value in (summary.get("bytes_by_scheme") or {}).items():
        values[f"comm/bytes_dense_{scheme}"] = value
    when = milliseconds(summary.get("ended") or summary.get("started"))
    return list(_points(values, when, summary.get("iterations") or 0))


def milliseconds(moment: str | None) -> int:
    """Since 1970, of an ISO time; 0 if there is none."""
    try:
        return round(datetime.fromisoformat(moment or "").timestamp() * 1000)
    except ValueError:
        return 0


def run_name(summary: Mapping[str, Any], config: Mapping[str, Any], axes: Sequence[str] = ()) -> str:
    """``tracking.run_name``, else like ``hybrid 4 nodes``, with the values of a sweep's other ``axes`` behind it.

    A choice of comm with a name of its own (``comm=caffe_ps``) goes by that.
    """
    given = (config.get("tracking") or {}).get("run_name")
    if given:
        return short(str(given))
    nodes, overrides = summary.get("nodes"), summary.get("overrides") or []
    comm = next((o.partition("=")[2] for o in overrides if o.startswith("comm=")), summary.get("comm"))
    name = str(comm) if comm == "single" else f"{comm} {nodes} node{'' if nodes == 1 else 's'}"
    swept = [axis for axis in axes if axis not in ("comm", "comm.name", "cluster.nodes")]
    own = [o for o in overrides if o.partition("=")[0] in swept]
    return short(" ".join([name, *own]))


def short(name: str) -> str:
    return _cut(" ".join(name.split()), _LONGEST_KEY)


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flatten(item, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, _text(value)


def _text(value: Any) -> str:
    """As it stands in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _points(values: Mapping[str, Any], timestamp: int, step: int) -> Iterator[Point]:
    for key, value in values.items():
        known = [n for n in map(_number, value if isinstance(value, (list, tuple)) else [value]) if n is not None]
        if known:
            yield Point(key, max(known), timestamp, step)


def _number(value: Any) -> float | None:
    """None for what MLflow could not draw, infinities and NaN among it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _key(name: str) -> str:
    """A param's name, of the characters that MLflow takes in one; a slash would have to make a path of it."""
    return _cut(re.sub(r"[^\w. -]", "_", name), _LONGEST_KEY)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
