"""What a training is made of, built from the config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from poseidon.config.build import build
from poseidon.config.schema import TrainConfig
from poseidon.errors import UserError
from poseidon.models import load_weights
from poseidon.planning import FactorSize, Timing
from poseidon.training.loader import rows_of
from poseidon.training.seeding import seed_model

log = logging.getLogger("poseidon")


@dataclass
class Parts:
    """Model (on the device), optimizer, and everything else that the loop calls.

    Attributes:
        schedule: a torch LR scheduler, stepped once per ``schedule_interval`` ("epoch" or "iteration").
        train, evaluation: map-style datasets of (input, target) with ``train_size``, ``eval_size`` rows.
        has_values: False: an emulated accelerator computes nothing, so that there is no loss, nothing to evaluate, to
            compare or to keep.
        sizes: of the factors that iteration 0 would tell, if they are known before.
        timing: what comm.rule=time goes by, likewise.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Any, Any], Tensor]
    metric: Callable[[Any, Any], Tensor]
    train: Dataset[Any]
    evaluation: Dataset[Any]
    train_size: int
    eval_size: int
    schedule: Any | None = None
    schedule_interval: str = "epoch"
    has_values: bool = True
    sizes: Mapping[str, FactorSize] | None = None
    timing: Timing | None = None


def assemble(config: TrainConfig, device: torch.device) -> Parts:
    """Builds all parts, with the same initial weights on every rank.

    Raises:
        UserError: naming the config key of a part that cannot be built or is not what it must be.
    """
    train, evaluation = _datasets(config)
    seed_model(config.seed)
    model = build(config.model, key="model")
    if not isinstance(model, nn.Module):
        raise UserError(f"model: {_target(config.model)} gave {type(model).__name__}, must be a nn.Module")
    _start_from(config, model)
    model.to(device)
    optimizer = build(config.optimizer, model.parameters(), key="optimizer")
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizer: {_target(config.optimizer)} gave {type(optimizer).__name__}, not an Optimizer")
    interval = config.schedule.get("interval", "epoch")
    if interval not in ("epoch", "iteration"):
        raise UserError(f"schedule.interval: {interval!r} is not one of epoch, iteration")
    loss = build(config.loss, key="loss")
    return Parts(
        model=model,
        optimizer=optimizer,
        loss=loss.to(device) if isinstance(loss, nn.Module) else _callable(loss, "loss"),
        metric=_callable(build(config.metric, key="metric"), "metric"),
        train=train,
        evaluation=evaluation,
        train_size=rows_of(train, "dataset (training)"),
        eval_size=rows_of(evaluation, "dataset (evaluation)"),
        schedule=build(config.schedule, optimizer, key="schedule") if _target(config.schedule) else None,
        schedule_interval=interval,
    )


def _start_from(config: TrainConfig, model: nn.Module) -> None:
    """Loads ``model.weights``, if there are any and no checkpoint replaces them."""
    weights, fresh = config.model.get("weights"), config.model.get("fresh") or []
    if weights is None:
        return
    if config.trainer.resume is not None:  # the command of a run that is to go on, and that started from these
        log.warning("model.weights is not read: trainer.resume brings weights of its own")
        return
    # A config without the key takes it with a plus only.
    load_weights(model, weights, fresh, option="model.fresh" if "fresh" in config.model else "+model.fresh")


def _datasets(config: TrainConfig) -> tuple[Dataset[Any], Dataset[Any]]:
    pair: Any = build(config.dataset, key="dataset")
    try:
        train, evaluation = pair
    except (TypeError, ValueError):
        raise UserError(
            f"dataset: {_target(config.dataset)} gave {type(pair).__name__}, must be a pair (train, eval)"
        ) from None
    return train, evaluation


def _callable(part: Any, key: str) -> Any:
    if not callable(part):
        raise UserError(f"{key}: {type(part).__name__} cannot be called with (output, target)")
    return part


def _target(node: dict[str, Any]) -> str | None:
    target = node.get("_target_")
    return None if target is None else str(target)
