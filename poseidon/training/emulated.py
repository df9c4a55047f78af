"""The parts of a training on an emulated accelerator: layers that sleep, rows without content, nothing to evaluate."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from poseidon.api import Session
from poseidon.api.env import JobEnv
from poseidon.config.build import build
from poseidon.config.density import densities
from poseidon.config.schema import Comm, TrainConfig
from poseidon.emulation.accelerator import Accelerator, Costs
from poseidon.emulation.layers import LayerTime, layer_times, step_bytes, trace
from poseidon.emulation.model import EmulatedOptimizer, emulate
from poseidon.engine.parameters import observe, trainable
from poseidon.errors import UserError
from poseidon.planning import FactorSize, Timing
from poseidon.tracking.summary import part_name
from poseidon.training.loader import rows_of
from poseidon.training.loop import devices_of, rows_of_rank, rows_per_step
from poseidon.training.parts import Parts
from poseidon.training.plan import as_trained, by_time, codes, inputs_of_one_node
from poseidon.training.timing import timing_of
from poseidon.transport import inproc_mesh

_WITHOUT_ENGINE = (Comm.single, Comm.ddp, Comm.fsdp)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of which there are so many, and nothing else."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._row = torch.zeros(())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._row, self._row


def session_of_one(config: TrainConfig, timeout: float) -> Session:
    """One node alone. Under our own schemes it has an engine: its emulated host copies and sums all the same, as the
    one-node points of ATC'17 did."""
    endpoint: Any = None if config.comm.name in _WITHOUT_ENGINE else inproc_mesh(1)[0]
    return Session(JobEnv(), torch.device("cpu"), endpoint=endpoint, timeout=timeout)


def emulated_parts(config: TrainConfig, session: Session) -> Parts:
    """Builds all parts, and makes the session's gradients those of an emulated accelerator.

    Every step has all its rows: a profile's times are of whole batches.

    Raises:
        UserError: naming the config key of what cannot be emulated.
    """
    profile = config.hardware
    assert profile is not None
    rows = rows_of_rank(config, session.rank)
    model = on_meta(config)
    trial = copy.deepcopy(model)
    whole_times, step = _times(config, trial, inputs_of_one_node(config, "meta", rows), rows)
    pieces = config.trainer.accumulate  # of a batch, each with passes of its own
    times = [replace(t, forward=t.forward / pieces, backward=t.backward / pieces) for t in whole_times]
    if config.comm.name is Comm.fsdp:
        step /= session.world_size  # of its rows only
    accelerator = session.accelerator = Accelerator(
        times, Costs.of(profile, step), dilation=config.cluster.time_dilation
    )
    emulate(model, times, accelerator, densities(config.model))
    size = _size(config)
    whole = rows_per_step(config) * len(session.topology.nodes)
    data = Rows(max(1, size // whole) * whole)
    return Parts(
        model=model,
        optimizer=EmulatedOptimizer(model.parameters(), accelerator),
        loss=lambda output, target: output,
        metric=lambda output, target: output,
        train=data,
        evaluation=data,
        train_size=len(data),
        eval_size=len(data),
        has_values=False,
        sizes=_sizes(config, trial),
        timing=timing_of(config, times) if by_time(config) or codes(config) else None,
    )


def undilated(config: TrainConfig) -> tuple[int, float]:
    """Calls of layers in an iteration, and the seconds that it lasts where nothing is communicated.

    Raises:
        UserError: as :func:`emulated_parts`.
    """
    rows = rows_of_rank(config, 0)
    times, step = _times(config, on_meta(config), inputs_of_one_node(config, "meta", rows), rows)
    return len(times), sum(call.forward + call.backward for call in times) + step


def profiled(config: TrainConfig) -> Timing | None:
    """What comm.rule=time goes by on the config's emulated accelerators; None if their links' rate is not known.

    Raises:
        UserError: as :func:`emulated_parts`.
    """
    rows = rows_of_rank(config, 0)
    return timing_of(config, _times(config, on_meta(config), inputs_of_one_node(config, "meta", rows), rows)[0])


def _times(config: TrainConfig, trial: nn.Module, inputs: Any, rows: int) -> tuple[list[LayerTime], float]:
    """Of the layers' calls, and of the optimizer step."""
    assert config.hardware is not None
    calls = trace(trial, inputs)
    if not calls:
        raise UserError(f"model: {config.model.get('_target_')} has no parameter to train")
    touched = step_bytes(lambda params: build(config.optimizer, params, key="optimizer"), trial.parameters())
    return layer_times(calls, config.hardware, part_name(config.model) or "", rows, step_bytes=touched)


def on_meta(config: TrainConfig) -> nn.Module:
    """The model on the meta device, ready to train."""
    try:
        with torch.device("meta"):
            model: Any = build(config.model, key="model")
    except NotImplementedError:  # it computes with numbers while it is built
        model = build(config.model, key="model")
    if not isinstance(model, nn.Module):
        raise UserError(f"model: {config.model.get('_target_')} gave {type(model).__name__}, must be a nn.Module")
    return model.train().to("meta")


def _sizes(config: TrainConfig, trial: nn.Module) -> dict[str, FactorSize] | None:
    """What iteration 0 would tell of factors: a whole iteration by PS takes long on a slow link."""
    if config.comm.name in _WITHOUT_ENGINE:
        return None
    infos = trainable(trial)[1]
    inputs = inputs_of_one_node(config, "meta", -(-rows_per_step(config) // devices_of(config)))
    return as_trained(config, infos, observe(trial, lambda: trial(inputs)))


def _size(config: TrainConfig) -> int:
    size = config.dataset.get("size")
    if isinstance(size, int):
        return size
    pair: Any = build(config.dataset, key="dataset")
    return rows_of(pair[0], "dataset (training)")
