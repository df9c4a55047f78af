"""Runs that nobody made, in an MLflow store as the launcher writes it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

#: Dense bytes of a model that a node sends per iteration, by scheme, for two nodes.
LENET = {"ps": 1_724_320.0, "conv": 103_000.0, "factors": 186_000.0}


@dataclass
class Fake:
    """A job: what its summary, its config and its metrics say."""

    summary: dict[str, Any]
    params: dict[str, str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    artifact: bool = True
    kind: str = "run"


def fake(
    comm: str = "hybrid",
    nodes: int = 2,
    seed: int = 0,
    *,
    speed: float | None = 1000.0,
    model: str = "lenet",
    dataset: str = "mnist5k",
    classes: int = 10,
    batch_size: int = 32,
    rows: int | None = None,
    points: int = 8,
    evaluations: int = 3,
    status: str = "completed",
    error: str | None = None,
    host: dict[str, Any] | None = None,
    params: dict[str, str] | None = None,
    overrides: tuple[str, ...] = (),
    **summary: Any,
) -> Fake:
    """A run as its records tell it.

    Args:
        rows: of comm=single with trainer.global_batch.
        params: config keys that are not the default.
        summary: fields of summary.json that are not what they would be.
    """
    nodes = 1 if comm == "single" else nodes
    batch = rows or batch_size
    config = {
        "model.name": model,
        "model.num_classes": str(classes),
        "dataset.name": dataset,
        "dataset.num_classes": str(classes),
        "metric.name": "accuracy",
        "optimizer.lr": "0.02",
        "comm.name": comm,
        "comm.overlap": "backward",
        "comm.rule": "paper",
        "cluster.nodes": str(nodes),
        "cluster.threads": "1",
        "trainer.batch_size": str(batch_size),
        "trainer.global_batch": str(rows),
        "trainer.epochs": "3",
        "seed": str(seed),
        "nodes": str(nodes),
        "global_batch": str(nodes * batch),
        **(params or {}),
    }
    step = nodes * batch / speed if speed else None
    lines = _lines(points, evaluations, step or 0.03, nodes * batch, seed)
    done = status == "completed"
    content = {
        "status": status,
        "error": error,
        "degree": "real",
        "comm": comm,
        "overlap": config["comm.overlap"],
        "rule": config["comm.rule"],
        "model": model,
        "dataset": dataset,
        "throughput_only": False,
        "cluster": "local",
        "nodes": nodes,
        "devices_per_node": 1,
        "threads": 1,
        "batch_size": batch,
        "global_batch": nodes * batch,
        "precision": "fp32",
        "seed": seed,
        "iterations": 10 * points if done else None,
        "epochs": 3 if done else None,
        "images_per_second": speed if done else None,
        "iteration_seconds": {"median": step, "p10": step * 0.9, "p90": step * 1.2} if step and done else None,
        "stall_seconds": step * 0.2 if step and nodes > 1 else None,
        "bytes_sent_per_iteration": [b * 1.001 for b in [sum(_bytes(comm, nodes).values())] * nodes],
        "bytes_dense_per_iteration": [sum(_bytes(comm, nodes).values())] * nodes,
        "bytes_planned_per_iteration": [sum(_bytes(comm, nodes).values()) * 1.01] * nodes if comm != "ddp" else None,
        "bytes_by_scheme": _bytes(comm, nodes),
        "bytes_source": "computed" if comm == "ddp" else "counted",
        "train_loss": lines[points - 1]["train_loss"] if done and points else None,
        "eval_accuracy": lines[-1].get("eval_accuracy") if done and lines else None,
        "eval_loss": 0.1 if done else None,
        "train_seconds": 3.0 if done else None,
        "oversubscribed": False,
        "overrides": [f"comm={comm}", f"cluster.nodes={nodes}", f"seed={seed}", *overrides],
        "started": f"2026-01-02T03:{seed:02d}:{nodes:02d}+00:00",
        "ended": "2026-01-02T04:00:00+00:00",
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": False,
        "versions": {"python": "3.11.7", "poseidon": "0.1.0", "torch": "2.14.1"},
        "host": host or {"name": "node0", "cpu": "AMD EPYC", "cores": 8, "memory": 2**35, "os": "Linux-6.1"},
        **summary,
    }
    return Fake(content, config, lines)


def asleep(
    comm: str = "hybrid",
    nodes: int = 2,
    seed: int = 0,
    *,
    hardware: str = "titan_x",
    link: str | None = "10gbit",
    dilation: float = 8.0,
    seconds: float | None = None,
    params: dict[str, str] | None = None,
    **changes: Any,
) -> Fake:
    """A run on emulated accelerators and links.

    Args:
        seconds: per iteration, undilated, instead of a speed.
    """
    model, rows = changes.get("model", "lenet"), changes.get("batch_size", 32)
    config = {
        "cluster.name": "emulated",
        "cluster.bandwidth": link or "null",
        "cluster.node_bandwidth": "{}",
        "cluster.latency": "null",
        "cluster.time_dilation": str(float(dilation)),
        "hardware.name": hardware,
        "hardware.source": "the set-up",
        "hardware.trust": "unverified",
        "hardware.host_copy": "9790000000.0",
        "hardware.server_sum": "1495000000.0",
        "hardware.memory_bandwidth": "336500000000.0",
        "hardware.sources.host_copy.source": "fitted",
        "hardware.sources.host_copy.trust": "derived",
        "hardware.iterations.alexnet.seconds": "0.25",
        f"hardware.iterations.{model}.seconds": "0.925",
        **(params or {}),
    }
    if seconds is not None:
        changes["speed"] = (1 if comm == "single" else nodes) * rows / seconds
    costs = ["layers", "reconstruction", "optimizer step", "host_copy", "server_sum", "network"]
    return fake(
        comm,
        nodes,
        seed,
        points=0,
        evaluations=0,
        params=config,
        **{
            "degree": "emulated",
            "emulated_costs": costs,
            "not_emulated": [],
            "hardware": hardware,
            "hardware_basis": "0.925 s per iteration (published: P17), shared out among the layers by FLOPs",
            "time_dilation": float(dilation),
            "cluster": "emulated",
            "throughput_only": True,
            **changes,
        },
    )


#: P17's largest experiment.
P17: dict[str, Any] = {"model": "vgg19_22k", "dataset": "synthetic", "classes": 21841, "link": "40gbit", "dilation": 8}


def p17(comm: str, nodes: int, seconds: float, overlap: str = "backward", **changes: Any) -> Fake:
    """A run of it."""
    return asleep(comm, nodes, seconds=seconds, params={"comm.overlap": overlap}, **{**P17, **changes})


def write(uri: str, experiment: str, fakes: list[Fake], artifacts: Path) -> None:
    """Adds an experiment with these runs, a millisecond apart."""
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    folder = (artifacts / "mlruns").as_uri()
    experiment_id = found.experiment_id if found else client.create_experiment(experiment, artifact_location=folder)
    for number, one in enumerate(fakes):
        _write(client, experiment_id, one, 1_760_000_000_000 + number)


def _write(client: MlflowClient, experiment_id: str, one: Fake, start: int) -> None:
    summary = one.summary
    name = f"{summary.get('comm')}-{summary.get('nodes')}"
    tags = {"poseidon.kind": one.kind, "poseidon.status": str(summary.get("status"))}
    run_id = client.create_run(experiment_id, start_time=start, tags=tags, run_name=name).info.run_id
    metrics = [metric for line in one.lines for metric in _metrics(line, start)]
    params = [Param(key, value) for key, value in one.params.items()]
    client.log_batch(run_id, metrics=metrics, params=params, tags=[RunTag("poseidon.degree", "real")])
    if one.artifact:
        with TemporaryDirectory() as folder:
            file = Path(folder, "summary.json")
            file.write_text(json.dumps(summary), encoding="utf-8")
            client.log_artifact(run_id, str(file))
    if summary.get("status") != "running":
        client.set_terminated(run_id, "FINISHED" if summary.get("status") == "completed" else "FAILED")


def _metrics(line: dict[str, Any], start: int) -> list[Metric]:
    names = {"train_loss": "train/loss", "eval_accuracy": "eval/accuracy", "eval_loss": "eval/loss"}
    kind = "train" if "train_loss" in line else "eval"
    values = {names[key]: value for key, value in line.items() if key in names}
    values[f"{kind}/wall_s"] = line["wall_s"]
    when = start + int(1000 * line["wall_s"])
    return [Metric(name, value, when, line["iteration"]) for name, value in values.items()]


def _lines(points: int, evaluations: int, step: float, rows: int, seed: int) -> list[dict[str, Any]]:
    noise = random.Random(seed)
    lines = []
    for i in range(1, points + 1):
        seen = 10 * i * rows
        loss = 0.05 + 2.2 * math.exp(-seen / 4000) * noise.uniform(0.9, 1.1)
        lines.append({"iteration": 10 * i, "wall_s": 10 * i * step, "train_loss": loss, "images_per_second": 1.0})
    for i in range(1, evaluations + 1):
        done = 10 * points * i / evaluations
        value = 0.97 - 0.6 * math.exp(-done * rows / 3000) + noise.uniform(-0.01, 0.01)
        lines.append({"iteration": int(done), "wall_s": done * step, "eval_accuracy": value, "eval_loss": 0.3 / i})
    return lines


def _bytes(comm: str, nodes: int) -> dict[str, float]:
    share = (nodes - 1) / nodes * 2
    if nodes == 1 or comm == "single":
        return {}
    if comm in ("ps", "ddp"):
        return {comm: LENET["ps"] * share}
    return {"ps": LENET["conv"] * share, "sfb": LENET["factors"] * (nodes - 1)}
