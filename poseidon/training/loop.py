"""The training loop: epochs or iterations, evaluations, checkpoints; the same code for one rank and many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from poseidon.config.schema import Comm, TrainConfig
from poseidon.config.shares import cut
from poseidon.data.sampler import GlobalBatchSampler
from poseidon.errors import UserError
from poseidon.training import checkpoint
from poseidon.training.checkpoint import Position
from poseidon.training.clock import IterationClock
from poseidon.training.evaluate import Evaluator, Score
from poseidon.training.loader import Batch, EpochLoader
from poseidon.training.parts import Parts
from poseidon.training.recorder import INTERVAL, PATIENT, Recorder
from poseidon.training.seeding import seed_epoch
from poseidon.training.step import Stepper, autocast
from poseidon.training.straggler import straggler_of
from poseidon.training.tracing import tracing_of

if TYPE_CHECKING:
    from poseidon.api import Session
    from poseidon.tracking.metrics import MetricsWriter


@dataclass
class Outcome:
    """What a training came to; loss and score are global and the same on every rank."""

    position: Position
    clock: IterationClock
    train_loss: float | None = None
    score: Score | None = None
    seconds_to_target: float | None = None


@dataclass
class Outputs:
    """Where rank 0 leaves what happens; all None in a test or on other ranks."""

    writer: MetricsWriter | None = None
    show: Callable[[dict[str, Any]], None] | None = None
    plan: Callable[[Any], None] | None = None  # gets the layers' plan once it is made
    checkpoints: Path | None = None  # folder
    config: dict[str, Any] = field(default_factory=dict)  # kept in checkpoints


def rows_of_rank(config: TrainConfig, rank: int) -> int:
    """Rows of one rank in a full step."""
    nodes, devices = (1, 1) if config.comm.name is Comm.single else (config.cluster.nodes, devices_of(config))
    shares = shares_of(config) or [1] * nodes
    return len(cut(nodes * rows_per_step(config), rank, [share for share in shares for _ in range(devices)]))


def devices_of(config: TrainConfig) -> int:
    """Ranks of a node."""
    return 1 if config.comm.name is Comm.single else config.cluster.devices_per_node


def shares_of(config: TrainConfig) -> list[float] | None:
    """Of the global batch, by node; None: all the same."""
    return None if config.comm.name is Comm.single else config.cluster.batch_shares


def rows_per_step(config: TrainConfig) -> int:
    """Rows of a node in a full step, on average."""
    trainer = config.trainer
    if config.comm.name is Comm.single and trainer.global_batch is not None:
        return trainer.global_batch
    return trainer.batch_size


class Trainer:
    """Trains ``parts`` as ``config`` says, with a session of any world size.

    Loaders, checkpoint and engine are set up by the constructor, in this order: data-loading workers must be
    forked before the engine has threads, and weights are restored before it looks at them.

    Raises:
        UserError: settings, checkpoint, loss or metric are not usable.
        PeerLostError: another rank is gone.
    """

    def __init__(self, session: Session, parts: Parts, config: TrainConfig, outputs: Outputs | None = None) -> None:
        self._session, self._parts, self._config = session, parts, config
        self._outputs = outputs or Outputs()
        trainer = config.trainer
        self.position = self._restored()
        self._stop = False  # a target has been reached
        self._limit = _limit(trainer.epochs, trainer.iterations, parts.train_size)
        context = autocast(trainer.precision.value, session.device)
        self._loader = EpochLoader(
            parts.train,
            GlobalBatchSampler(
                parts.train_size,
                rows_per_step(config),
                rank=session.rank,
                world_size=session.world_size,
                seed=config.seed,
                shares=shares_of(config),
                devices=devices_of(config),
            ),
            device=session.device,
            micro_batches=trainer.accumulate,
            workers=trainer.workers,
        )
        self._evaluator = Evaluator(
            parts.evaluation,
            parts.eval_size,
            parts.loss,
            parts.metric,
            session,
            batch_size=trainer.eval_batch_size,
            workers=trainer.workers,
            autocast=context,
        )
        if not self._done():
            self._loader.fork(self.position.epoch, self.position.row)
        self._evaluator.fork()
        self.tracing = tracing_of(config, session, parts, done=self.position.iteration, total=self._total())
        self.model = session.distribute(
            parts.model,
            parts.optimizer,
            config.comm.name.value,
            overlap=config.comm.overlap.value,
            rule=config.comm.rule.value,
            plan=config.comm.plan if config.comm.name is Comm.hybrid else None,
            kv_bytes=config.comm.kv_bytes,
            merge_bytes=config.comm.merge_bytes,
            staleness=config.comm.staleness if session.world_size > 1 else 0,
            staleness_mode=config.comm.staleness_mode.value,
            sparse=config.comm.sparse.value,
            bucket_cap_mb=config.comm.ddp.bucket_cap_mb,
            sizes=parts.sizes,
            timing=parts.timing,
        )
        self._reducer_is_torchs = config.comm.name.of_torch and session.world_size > 1
        self._stepper = Stepper(
            session,
            self.model,
            parts.optimizer,
            parts.loss,
            clip_norm=trainer.clip_norm,
            autocast=context,
            plain_mean=self._reducer_is_torchs,
            clip_own=config.comm.name is Comm.downpour,
        )
        self._straggler = straggler_of(config, session.topology, session.rank)
        clock = IterationClock(config.cluster.time_dilation, trainer.warmup, lambda: session.stall_seconds(self.model))
        self._outcome = Outcome(self.position, clock)

    def run(self) -> Outcome:
        """Collective: trains to the end, evaluates, and writes the last checkpoint."""
        outcome, position = self._outcome, self.position
        self._before, self._began = position.seconds, time.perf_counter()
        self._recorder = Recorder(
            self._session,
            self.model,
            outcome.clock,
            log_every=self._config.trainer.log_every,
            interval=PATIENT if self._config.comm.patient else INTERVAL,
            total=self._total(),
            start=position.iteration,
            writer=self._outputs.writer,
            show=self._outputs.show,
            counted=not self._reducer_is_torchs,
            has_values=self._parts.has_values,
        )
        self.model.train()
        while not self._done():
            self._epoch()
        self._session.drain()
        position.seconds = self._seconds()
        outcome.clock.end()
        if self._parts.has_values:
            if outcome.score is None:
                self._evaluate()
            outcome.train_loss = self._recorder.train_loss
            if self._config.trainer.checkpoint:
                self._checkpoint("last.pt")
        return outcome

    def _epoch(self) -> None:
        """One epoch, or what is left of it, or what the limits allow of it."""
        position = self.position
        seed_epoch(self._config.seed, self._session.rank, position.epoch, position.row)
        self._recorder.begin_epoch()
        for batches in self._loader.epoch(position.epoch, position.row):
            self._outcome.score = None  # of weights that are now changed
            self._iteration(batches)
            if self._done():
                break

    def _iteration(self, batches: list[Batch]) -> None:
        if self._straggler is not None:
            self._straggler.wait(self.position.iteration)
        left = self._parts.train_size - self.position.row
        if self.tracing is not None:
            self.tracing.begin(self.position.iteration + 1)
        loss, rows = self._stepper.step(batches, min(self._loader.sampler.global_batch, left))
        if self.tracing is not None:
            self.tracing.end()
        self._outcome.clock.tick()
        ended = self._advance()
        learning_rate = float(self._parts.optimizer.param_groups[0]["lr"])
        self._recorder.step(self.position, self._epochs(), loss, rows, learning_rate, last=ended or self._done())
        self._publish_plan()
        if self._parts.has_values:
            self._between_iterations(ended)

    def _between_iterations(self, ended: bool) -> None:
        if ended and self._due(self._config.trainer.eval_every, self.position.epoch):
            self._evaluate()
        self._step_schedule(ended)
        if self._due(self._config.trainer.check_every, self.position.iteration):
            self._session.drain()
            with self._outcome.clock.paused():
                self._session.check(self.model)
        if self._due(self._config.trainer.checkpoint_every, self.position.iteration):
            self._checkpoint(f"iteration-{self.position.iteration}.pt")

    def _advance(self) -> bool:
        """Moves the position past a step; True at an epoch's end."""
        position = self.position
        position.iteration += 1
        position.row += self._loader.sampler.global_batch
        position.seconds = self._seconds()
        if position.row < self._parts.train_size:
            return False
        position.epoch, position.row = position.epoch + 1, 0
        return True

    def _seconds(self) -> float:
        """Of training so far, earlier parts of a resumed run included."""
        return self._before + (time.perf_counter() - self._began) / self._outcome.clock.dilation

    def _step_schedule(self, epoch_ended: bool) -> None:
        schedule = self._parts.schedule
        if isinstance(schedule, ReduceLROnPlateau):
            if epoch_ended:
                score, train_loss = self._outcome.score, self._recorder.train_loss
                assert train_loss is not None  # exchanged at every epoch's end
                schedule.step(score.loss if score is not None else train_loss)
        elif schedule is not None and (epoch_ended or self._parts.schedule_interval == "iteration"):
            schedule.step()

    def _evaluate(self) -> None:
        outcome, position = self._outcome, self.position
        self._session.drain()  # training's time, not the evaluation's
        with outcome.clock.paused():
            outcome.score = self._evaluator.run(self.model)
            position.seconds = self._seconds()
            self._recorder.evaluated(position, self._epochs(), outcome.score)
        target = self._config.trainer.target_accuracy
        # Every rank has the same score, so all stop here.
        if target is not None and outcome.score.accuracy >= target and outcome.seconds_to_target is None:
            outcome.seconds_to_target = position.seconds
            self._stop = True

    def _checkpoint(self, name: str) -> None:
        self._session.drain()
        with self._outcome.clock.paused():
            self._session.synchronize()
            if self._outputs.checkpoints is not None:
                checkpoint.save(
                    self._outputs.checkpoints / name,
                    self.position,
                    self.model,
                    self._parts.optimizer,
                    self._parts.schedule,
                    seed=self._config.seed,
                    size=self._parts.train_size,
                    config=self._outputs.config,
                )

    def _publish_plan(self) -> None:
        # Made from the rows of iteration 0, so it holds from iteration 1 on.
        if self._outputs.plan is not None and len(self._outcome.clock.seconds) == 1:
            with self._outcome.clock.paused():
                self._outputs.plan(self._session.report(self.model)["plan"])

    def _restored(self) -> Position:
        parts, resume = self._parts, self._config.trainer.resume
        if resume is None:
            return Position()
        return checkpoint.restore(
            Path(resume),
            parts.model,
            parts.optimizer,
            parts.schedule,
            seed=self._config.seed,
            size=parts.train_size,
        )

    def _done(self) -> bool:
        rows, iterations = self._limit
        seen = self.position.epoch * self._parts.train_size + self.position.row
        return self._stop or seen >= rows or self.position.iteration >= iterations

    def _epochs(self) -> float:
        return self.position.epoch + self.position.row / self._parts.train_size

    def _total(self) -> int:
        """Iterations at the end of the run, unless a target stops it before."""
        rows, iterations = self._limit
        size, step = self._parts.train_size, self._loader.sampler.global_batch
        if math.isinf(rows):
            return int(iterations)
        epochs, rest = divmod(int(rows) - self.position.epoch * size, size)
        steps = epochs * math.ceil(size / step) + math.ceil(rest / step) - self.position.row // step
        return int(min(iterations, self.position.iteration + max(0, steps)))

    @staticmethod
    def _due(every: int, count: int) -> bool:
        return every > 0 and count % every == 0


def _limit(epochs: float | None, iterations: int | None, size: int) -> tuple[float, float]:
    """(rows, iterations) at which to stop, whichever comes first."""
    if epochs is None and iterations is None:
        raise UserError("trainer.epochs and trainer.iterations are both null: give at least one of them")
    rows = math.inf if epochs is None else math.ceil(epochs * size - 1e-6)
    return rows, math.inf if iterations is None else iterations
