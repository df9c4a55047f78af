"""The timeline of chosen iterations (``trainer.trace``): begun and ended around a step, written after the run."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.config.schema import Comm, TrainConfig
from poseidon.emulation.accelerator import Accelerator
from poseidon.errors import UserError
from poseidon.tracing import FOLDER, About, LayerHooks, Row, Tracer, rank_file, write
from poseidon.tracking.summary import part_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from poseidon.api import Session
    from poseidon.training.parts import Parts

_STEP = About("optimizer step", more={"pass": "optimizer step"})


class Tracing:
    """Of one rank. Make it before ``session.distribute``.

    Args:
        iterations: counted from 1, as in metrics.jsonl.
    """

    def __init__(self, iterations: Sequence[int], session: Session, parts: Parts, config: TrainConfig) -> None:
        self._iterations, self._session, self._config = sorted(set(iterations)), session, config
        kinds = {path: type(module).__name__ for path, module in parts.model.named_modules()}
        self._tracer = session.tracer = Tracer(kinds)
        self._hidden = config.comm.name is Comm.ddp and session.world_size > 1  # are waits, in DDP's own code?
        self._layers: LayerHooks | None = None
        if isinstance(session.accelerator, Accelerator):
            session.accelerator.record(self._tracer)
        else:
            # FSDP2 adds to gradients the blocking way where their parameters have hooks.
            parameters = config.comm.name is not Comm.fsdp
            self._layers = LayerHooks(parts.model, self._tracer, parameters=parameters)
        self._begun, self._iteration = 0.0, 0
        self._watch(parts.optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before_step)
        if self._layers is not None:  # an emulated step is on the device's own timeline
            optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, *_: Any) -> None:
        self._begun = time.monotonic()
        if self._hidden and self._tracer.recording and self._tracer.computed:
            about = About("end of backward()")
            self._tracer.span(Row.wait, about, self._tracer.computed, max(self._begun, self._tracer.computed))

    def _after_step(self, *_: Any) -> None:
        self._tracer.span(Row.device, _STEP, self._begun, time.monotonic())

    def begin(self, iteration: int) -> None:
        """Before an iteration's step."""
        if iteration in self._iterations:
            self._iteration = iteration
            if self._layers is not None:
                self._layers.install()
            self._tracer.begin(iteration)

    def end(self) -> None:
        """After an iteration's step."""
        if self._tracer.recording:
            if self._layers is not None:
                self._layers.remove()
            self._tracer.end(goes_on=self._iteration + 1 in self._iterations)

    def save(self, run_dir: Path) -> Path:
        """After the run: this rank's file."""
        session, config = self._session, self._config
        emulated = config.hardware is not None
        about = {
            "host": platform.node(),
            "world_size": session.world_size,
            "nodes": len(session.topology.nodes),
            "iterations": self._iterations,
            "model": part_name(config.model),
            "comm": config.comm.name.value,
            "overlap": config.comm.overlap.value,
            "batch_size": config.trainer.batch_size,
            "bandwidth": config.cluster.bandwidth,
            "hardware": config.hardware.name if config.hardware is not None else None,
            "layers": "emulated device" if emulated else f"host's view of {session.device.type}",
        }
        file = run_dir / FOLDER / rank_file(session.rank)
        write(file, session.rank, self._tracer.events, about, config.cluster.time_dilation)
        return file


def tracing_of(config: TrainConfig, session: Session, parts: Parts, *, done: int, total: int) -> Tracing | None:
    """None without ``trainer.trace``: then nothing is recorded, hooked or wrapped.

    Args:
        done: iterations of the run that this one resumes; total: at this one's end.

    Raises:
        UserError: an iteration that this run does not make.
    """
    iterations = config.trainer.trace
    if not iterations:
        return None
    for iteration in iterations:
        if not done < iteration <= total:
            raise UserError(
                f"trainer.trace=[{', '.join(map(str, iterations))}]: there is no iteration {iteration}, this run makes "
                f"{done + 1} to {total}"
            )
    return Tracing(iterations, session, parts, config)
