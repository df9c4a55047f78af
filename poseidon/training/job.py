"""A whole run, from the launching process: folder, ranks, summary. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from poseidon.cluster import launch_job
from poseidon.cluster.base import LAUNCHER
from poseidon.config import dump_spec, to_plain
from poseidon.config.check import check_train
from poseidon.config.schema import ClusterKind, Comm, TrainConfig
from poseidon.emulation.host import find_host
from poseidon.errors import UserError
from poseidon.planning import read_plan, schemes_by_layer
from poseidon.reporting import run_figures
from poseidon.tracking import summary as summaries
from poseidon.tracking.folder import (
    CONFIG,
    LOGS,
    OVERRIDES,
    PLAN,
    SPEC,
    SUMMARY,
    create_run_dir,
    read_json,
    write_json,
    write_text,
)
from poseidon.tracking.job import Tracking
from poseidon.tracking.sweep import Sweep
from poseidon.training.dilation import pick, with_factor
from poseidon.training.progress import Display


@dataclass(frozen=True)
class JobOutcome:
    """How a run ended.

    Attributes:
        exit_code: for the calling process.
        value: what a sweep maximises: the evaluation's accuracy; None if there is none.
        run_dir: the run's folder, absolute.
        summary: content of summary.json.
    """

    exit_code: int
    value: float | None
    run_dir: Path
    summary: dict[str, Any] = field(default_factory=dict)


def run_job(config: TrainConfig, overrides: Sequence[str], run_dir: Path, *, quiet: bool = False) -> JobOutcome:
    """Trains as ``config`` says on all its nodes and leaves the records in a folder of the run's own.

    The folder is ``run_dir``, or ``run_dir-1`` ... if another run has it; ``JobOutcome.run_dir`` tells.
    The terminal gets progress, and in the end the result and where the records are; with ``quiet`` only what ranks say
    themselves, and no figure is drawn. MLflow gets the records from
    the folder, while the run goes on; a store that fails then costs the run nothing.

    Raises:
        UserError: a setting or the run store cannot be used; nothing has been started.
    """
    sweep, display = Sweep.current(), Display(Console(quiet=True) if quiet else None)
    config = _dilated(checked(config), sweep, display.console)
    tracking = Tracking(config, sweep, partial(display.on_line, LAUNCHER, "stderr"))
    run_dir = create_run_dir(run_dir)
    summary = summaries.begin(config, overrides, sweep.experiment)
    write_json(run_dir / SUMMARY, summary)
    status, error, exit_code = "failed", None, 1
    try:
        spec = _write_spec(config, overrides, run_dir)
        summary["mlflow"] = tracking.begin(run_dir)
        write_json(run_dir / SUMMARY, summary)
        cluster = config.cluster
        world_size = 1 if config.comm.name is Comm.single else cluster.nodes * cluster.devices_per_node
        job = launch_job(
            [sys.executable, "-m", "poseidon.training.worker", str(spec)],
            config.cluster,
            world_size,
            run_dir / LOGS,
            env={},
            on_line=display.on_line,
        )
        status, error, exit_code = job.status, job.reason or None, job.exit_code
        summary["not_emulated"] = list(job.warnings)
    except BaseException as failure:
        kind = "" if isinstance(failure, UserError) else f"{type(failure).__name__}: "
        error = " ".join(f"{kind}{failure}".split()).removesuffix(":")
        status = "interrupted" if isinstance(failure, KeyboardInterrupt) else "failed"
        raise
    finally:
        display.close()
        measured = read_json(run_dir / "result.json") or _so_far(display.last, read_json(run_dir / PLAN) or [])
        summary = summaries.end(summary, status, error, measured)
        write_json(run_dir / SUMMARY, summary)
        sweep.note(run_dir)
        _conclude(display.console, summary, run_dir)
        if summary["status"] == "completed" and not quiet:
            run_figures(run_dir)
        _track(tracking, display.console, summary, run_dir)
    return JobOutcome(exit_code, summary["eval_accuracy"], run_dir, summary)


def checked(config: TrainConfig) -> TrainConfig:
    """The config, with the paths of a checkpoint and of a recorded plan made absolute.

    Raises:
        UserError: naming the key that cannot be used, before anything is started.
    """
    check_train(config)
    if config.cluster.name is ClusterKind.emulated:
        find_host()
    trainer, comm = config.trainer, config.comm
    if comm.plan is not None and comm.name is Comm.hybrid:
        plan = str(Path(comm.plan).expanduser().absolute())
        try:
            read_plan(plan)
        except UserError as error:
            raise UserError(f"comm.{error}") from error
        config = replace(config, comm=replace(comm, plan=plan))
    if trainer.resume is None:
        return config
    return replace(config, trainer=replace(trainer, resume=str(find_checkpoint(trainer.resume))))


def _dilated(config: TrainConfig, sweep: Sweep, console: Console) -> TrainConfig:
    """The config with a number for cluster.time_dilation: that of the sweep, else what this run needs."""
    if sweep.dilation is not None:
        return with_factor(config, sweep.dilation)
    picked = pick([config])
    if picked is None:
        return config
    console.print(str(picked), markup=False)
    return with_factor(config, picked.factor)


def find_checkpoint(resume: str) -> Path:
    """The file that ``trainer.resume`` names, absolute. Raises UserError if there is none."""
    path = Path(resume).expanduser().absolute()
    if path.is_dir():
        found = sorted(path.glob("**/*.pt"), key=lambda file: file.stat().st_mtime)
        hint = f"; its newest checkpoint is {found[-1]}" if found else " and holds no checkpoint"
        raise UserError(f"trainer.resume: {path} is a folder{hint}")
    if not path.is_file():
        raise UserError(f"trainer.resume: there is no file {path}")
    return path


def _write_spec(config: TrainConfig, overrides: Sequence[str], run_dir: Path) -> Path:
    from omegaconf import OmegaConf

    spec = run_dir / SPEC
    dump_spec(spec, config, overrides, run_dir)
    for name, content in ((CONFIG, to_plain(config)), (OVERRIDES, list(overrides))):
        write_text(run_dir / name, OmegaConf.to_yaml(OmegaConf.create(content)))
    return spec


def _so_far(progress: dict[str, Any], plan: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run that did not come to its end has said of itself; no speed, which would be a mere glimpse.

    Args:
        plan: a row per parameter, or [] if the run did not get as far as that.
    """
    known = {"iterations": progress.get("iteration"), "schemes": schemes_by_layer(plan) or None}
    return known | {key: progress.get(key) for key in ("train_loss", "eval_accuracy", "eval_loss")}


def _track(tracking: Tracking, console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    """Brings what is in the folder of a run that has ended to MLflow, and says where it is."""
    tracking.end()
    if tracking.reference != summary["mlflow"]:  # the store has answered only now
        summary["mlflow"] = tracking.reference
        write_json(run_dir / SUMMARY, summary)
    for line in tracking.lines():
        console.print(line, markup=False)


def _conclude(console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    """The result in a few lines, and where the records are."""
    if summary["status"] == "completed":
        for line in describe(summary):
            console.print(line, markup=False)
    console.print(f"records: {run_dir}", markup=False)


def describe(summary: dict[str, Any]) -> list[str]:
    """A completed run in a few lines."""
    loss, speed = summary["train_loss"], summary["images_per_second"]
    said = summary["overlap"] != "full" and summary["comm"] not in ("single", "ddp", "fsdp", "downpour")
    overlap = f", overlap={summary['overlap']}" if said else ""
    devices, servers = summary["devices_per_node"], summary["servers"]
    what = f"comm={summary['comm']}{overlap}, nodes={summary['nodes']}"
    what += f", devices_per_node={devices}" if devices > 1 else ""
    what += f", servers={servers}" if servers is not None else ""
    if summary["hardware"] is not None:
        lines = [
            f"{summary['model']} on emulated {summary['hardware']}, {what}: nothing is computed, so nothing learnt"
        ]
    else:
        lines = [
            f"{summary['model']} on {summary['dataset']}, {what}: "
            f"accuracy {summary['eval_accuracy']:.2%}" + (f", training loss {loss:.4g}" if loss is not None else "")
        ]
    if speed is not None:
        iteration, mean = (summary["iteration_seconds"][key] for key in ("median", "mean"))
        waited = summary["stall_seconds"] if summary["nodes"] > 1 else None
        stall = f", {waited / mean:.0%} of the time waiting for communication" if waited is not None else ""
        lines.append(f"{speed:,.0f} images/s ({iteration * 1e3:.1f} ms per iteration{stall})")
    else:
        lines.append("made no iteration, or one, so there is no speed to tell; to go on, raise trainer.epochs")
    if summary["seconds_to_target"] is not None:
        lines.append(f"target accuracy reached after {summary['seconds_to_target']:.1f} s")
    if summary["nodes"] > 1 and speed is not None:
        sent = max(summary["bytes_sent_per_iteration"])
        computed = " (computed, not counted)" if summary["bytes_source"] == "computed" else ""
        alike = "" if summary["hardware"] is not None else "; replicas are bit-identical"
        if alike and summary["comm"] == "downpour":
            alike = "; replicas differed while training, by nature, and were made alike at its end"
        lines.append(f"{sent / 1e6:.3f} MB sent per iteration and node{computed}{alike}")
    if summary["degree"] == "emulated":
        lines.append(_reality(summary))
    elif summary["throughput_only"]:
        lines.append("the data set is synthetic: accuracy means nothing, only the speed does")
    return lines


def _reality(summary: dict[str, Any]) -> str:
    """What of an emulated run is, and whether this machine was its limit."""
    line = f"emulated: {', '.join(summary['emulated_costs'])}; times are undilated (f = {summary['time_dilation']:g})"
    if summary["cpu_bound"]:
        remedy = "raise cluster.time_dilation" if summary["hardware"] is not None else "take fewer nodes"
        line += f"; this machine's cores were the limit (cpu_bound): {remedy}"
    if summary["engine_bound"]:
        limit = summary["engine_limit_bits_per_second"]
        fill = f", which fills {limit / 1e9:.3g} Gbit/s at most" if limit else ""
        line += f"; a thread of the engine is busier than an undilated iteration allows (engine_bound{fill})"
    return line
