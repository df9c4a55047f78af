"""``summary.json``: what a run was and what came of it, also when it failed.

The launching process writes it: once before the ranks start (status "running", which stays if the machine
goes down), once when all have ended. Times are seconds, sizes bytes; lists have one entry per rank, of
bytes one per node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from poseidon.config.schema import ClusterKind, Comm, TrainConfig
from poseidon.tracking.facts import cores, git_state, host_facts, versions
from poseidon.tracking.where import shown

#: Measured by the ranks; null until (and unless) they have come to the end.
MEASURED = (
    "iterations",
    "epochs",
    "images_per_second",
    "iteration_seconds",
    "stall_seconds",
    "stall_seconds_per_rank",
    "cpu_seconds_per_iteration",
    "cpu_seconds_per_iteration_per_rank",
    "busiest_thread_seconds_per_iteration",
    "cpu_busy_share",
    "emulated_busy_seconds",
    "cpu_bound",
    "engine_bound",
    "engine_limit_bits_per_second",
    "cores_per_node",
    "bytes_sent_per_iteration",
    "bytes_dense_per_iteration",
    "bytes_planned_per_iteration",
    "bytes_inside_per_iteration",
    "bytes_inside_planned_per_iteration",
    "server_bytes_sent_per_iteration",
    "server_bytes_dense_per_iteration",
    "server_bytes_planned_per_iteration",
    "bytes_by_scheme",
    "bytes_by_layer",
    "bytes_source",
    "most_bytes_queued",
    "most_bytes_in_flight",
    "schemes",
    "rates",
    "train_loss",
    "eval_accuracy",
    "eval_loss",
    "replica_digests",
    "train_seconds",
    "seconds_to_target",
    "strangers",
)


def begin(config: TrainConfig, overrides: Sequence[str], experiment: str | None = None) -> dict[str, Any]:
    """The summary of a run that is about to start.

    Args:
        experiment: of a config that names none; default: :func:`default_experiment`.
    """
    single = config.comm.name is Comm.single
    nodes, devices = (1, 1) if single else (config.cluster.nodes, config.cluster.devices_per_node)
    batch = config.trainer.global_batch if single and config.trainer.global_batch else config.trainer.batch_size
    return {
        "status": "running",
        "error": None,
        "degree": "emulated" if emulated_costs(config) else "real",
        "emulated_costs": emulated_costs(config),
        "not_emulated": [],  # of what was asked for, in words
        "hardware": part_name(asdict(config.hardware)) if config.hardware is not None else None,
        "hardware_basis": config.hardware.basis(part_name(config.model) or "", batch) if config.hardware else None,
        "time_dilation": config.cluster.time_dilation,
        "comm": config.comm.name.value,
        "overlap": config.comm.overlap.value,
        "rule": config.comm.rule.value,
        "plan": config.comm.plan if config.comm.name is Comm.hybrid else None,
        "model": part_name(config.model),
        "dataset": part_name(config.dataset),
        "throughput_only": bool(config.dataset.get("throughput_only", False)),
        "experiment": config.tracking.experiment or experiment or default_experiment([config]),
        "cluster": config.cluster.name.value,
        "nodes": nodes,
        "devices_per_node": devices,
        "servers": None if single else config.cluster.servers,
        "threads": config.cluster.threads,
        "batch_size": batch,
        "global_batch": nodes * batch,
        "precision": config.trainer.precision.value,
        "seed": config.seed,
        **dict.fromkeys(MEASURED),
        "oversubscribed": (nodes * devices + config.cluster.dedicated) * config.cluster.threads > cores(),
        "mlflow": None,
        "overrides": [shown(override) for override in overrides],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "ended": None,
        **git_state(),
        "versions": versions(),
        "host": host_facts(),
    }


def emulated_costs(config: TrainConfig) -> list[str]:
    """What takes an emulated time in this run; [] if nothing does."""
    costs = []
    if config.hardware is not None:
        costs += ["layers", "reconstruction", "optimizer step"]
        costs += [key for key in ("host_copy", "server_sum") if getattr(config.hardware, key) is not None]
    if config.cluster.name is ClusterKind.emulated:
        costs.append("network")
    if slows_nodes(config):
        costs.append("straggler")
    return costs


def slows_nodes(config: TrainConfig) -> bool:
    """Is a node made slow now and then? Never the only one: comm=single is the baseline of all clusters."""
    return config.cluster.straggler.delay is not None and config.comm.name is not Comm.single


def end(summary: dict[str, Any], status: str, error: str | None, measured: dict[str, Any] | None) -> dict[str, Any]:
    """The summary of a run that has ended, with what is known of its measurements."""
    known = {key: value for key, value in (measured or {}).items() if key in MEASURED}
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    return {**summary, **known, "status": status, "error": error, "ended": ended}


def part_name(node: dict[str, Any]) -> str | None:
    """Name of a config group's choice: its ``name``, else the last component of its ``_target_``."""
    name = node.get("name") or str(node.get("_target_") or "").rpartition(".")[2]
    return str(name) if name else None


def default_experiment(configs: Sequence[TrainConfig]) -> str:
    """The experiment of jobs that belong together and name none: MLFLOW_EXPERIMENT_NAME, else like ``lenet-mnist5k``,
    or ``models-mnist5k`` if they are of several models."""
    parts = []
    for group in ("model", "dataset"):
        names = {str(part_name(getattr(config, group))) for config in configs}
        parts.append(names.pop() if len(names) == 1 else f"{group}s")
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "-".join(parts)
