"""Checkpoints: written whole or not at all, read without unpickling code.

A checkpoint holds model, optimizer, schedule, seed and config, and the place in the training: ``epoch``
(finished ones), ``row`` (rows of the next epoch already seen; 0 at an epoch's end) and ``iteration``. As
the order of rows depends on seed and epoch only, a run resumed from one taken within an epoch goes on with
the rows not yet seen. Random numbers start anew at each epoch from (seed, rank, epoch), so no generator's
state is needed: resumed at an epoch's end, dropout draws what it would have drawn; resumed within one, it
draws others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.errors import UserError

FORMAT = 1


@dataclass
class Position:
    """How far the training is."""

    epoch: int = 0  # finished epochs
    row: int = 0  # rows of the current epoch already seen
    iteration: int = 0  # finished iterations
    seconds: float = 0.0  # spent so far, evaluations included


def save(
    path: Path,
    position: Position,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Any | None,
    *,
    seed: int,
    size: int,
    config: dict[str, Any],
) -> None:
    """Writes a checkpoint; at no time is there half a file under ``path``."""
    content = {
        "format": FORMAT,
        **vars(position),
        "seed": seed,
        "size": size,  # rows of the training set
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "optimizer_class": _name(optimizer),
        "schedule": schedule.state_dict() if schedule is not None else None,
        "schedule_class": _name(schedule),
        "config": config,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def restore(
    path: Path, model: nn.Module, optimizer: Optimizer, schedule: Any | None, *, seed: int, size: int
) -> Position:
    """Loads a checkpoint into model, optimizer and schedule, and says where to go on.

    Raises:
        UserError: no such file, not a checkpoint, or one of another model, optimizer or schedule; or one
            taken within an epoch of another seed or dataset, whose remaining rows are not known.
    """
    content = _read(path)
    _load_model(path, model, content["model"])
    for part, name, key in (
        (optimizer, "optimizer", "optimizer_class"),
        (schedule, "schedule", "schedule_class"),
    ):
        if content[key] != _name(part):
            raise UserError(
                f"trainer.resume: {path} was written with {name} {content[key]}, this run has {_name(part)}"
            )
    _load_steppers(path, optimizer, schedule, content)
    if content["row"] and (content["seed"], content["size"]) != (seed, size):
        raise UserError(
            f"trainer.resume: {path} was taken within an epoch of {content['size']} rows with seed="
            f"{content['seed']}; resume with the same seed and dataset, or from one taken at an epoch's end"
        )
    return Position(content["epoch"], content["row"], content["iteration"], content["seconds"])


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"trainer.resume: {path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"trainer.resume: {path} is not a checkpoint of `poseidon train`")
    return content


def _load_model(path: Path, model: nn.Module, saved: dict[str, Any]) -> None:
    own = model.state_dict()
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            where = "the checkpoint" if name not in saved else "this run's model"
            raise UserError(f"trainer.resume: {path} is of another model: {where} has no {name}")
        shapes = [tuple(getattr(state[name], "shape", ())) for state in (saved, own)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"trainer.resume: {path} is of another model: {name} is {shapes[0]} there, {shapes[1]} here"
            )
    model.load_state_dict(saved)


def _load_steppers(path: Path, optimizer: Optimizer, schedule: Any | None, content: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(content["optimizer"])
    except ValueError as error:
        raise UserError(f"trainer.resume: {path} does not fit the optimizer: {error}") from error
    if schedule is not None:
        schedule.load_state_dict(content["schedule"])


def _name(part: object | None) -> str | None:
    return None if part is None else type(part).__qualname__
