"""Losses and rates while training: summed up locally, made global now and then, off the path of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from poseidon.training.checkpoint import Position
from poseidon.training.clock import IterationClock
from poseidon.training.evaluate import Score

if TYPE_CHECKING:
    from poseidon.api import Session
    from poseidon.tracking.metrics import MetricsWriter

#: Seconds between two exchanges of losses, and between two progress records.
INTERVAL = 1.0
#: The same for ranks that are not to wait for each other at every occasion.
PATIENT = 10.0


@dataclass
class Window:
    """What one rank saw in some successive iterations of one epoch; ``seconds``: the run's age at its end."""

    iteration: int
    epoch: float
    seconds: float
    loss: float = 0.0  # sum over rows
    rows: int = 0
    elapsed: float = 0.0  # seconds, without evaluations and checkpoints
    sent: int = 0  # bytes
    stall: float = 0.0  # seconds
    lr: float = 0.0


class Recorder:
    """Keeps sums per window of ``log_every`` iterations on every rank; rank 0 writes their global means.

    Windows are exchanged now and then, so several may travel together and the metrics file has a
    line for each. All ranks exchange at the same iterations: the next one follows from rank 0's rate, which
    every rank learns in the exchange before.

    Args:
        total: iterations that the run will make, for the progress line.
        interval: seconds between two exchanges.
        start: iterations made by the run that this one resumes.
        writer: of rank 0's metrics file.
        show: gets rank 0's progress records.
        counted: whether the session counts bytes and waits (it cannot for PyTorch's own reducer).
        has_values: False: losses mean nothing, and are left out.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        clock: IterationClock,
        *,
        log_every: int,
        total: int,
        interval: float = INTERVAL,
        start: int = 0,
        writer: MetricsWriter | None = None,
        show: Callable[[dict[str, Any]], None] | None = None,
        counted: bool = True,
        has_values: bool = True,
    ) -> None:
        self._counted, self._has_values = counted, has_values
        self._session, self._model, self._clock = session, model, clock
        self._log_every = max(1, log_every)
        self._total, self._interval = total, interval
        self._writer, self._show = writer, show
        self._sum: Tensor | float = 0.0
        self._rows = 0
        self._pending: list[Window] = []
        self._mark = (clock.now(), session.bytes_sent(model), session.stall_seconds(model))
        self._exchanged = (start, clock.now())  # iteration, time
        self._next = 0
        self._epoch_loss = (0.0, 0)  # global sum over rows, rows
        self._shown = time.monotonic()
        self._figures: dict[str, Any] = {}
        self.train_loss: float | None = None  # global mean over the rows of the newest epoch, part of one included

    def step(self, position: Position, epoch: float, loss: Tensor, rows: int, lr: float, *, last: bool) -> None:
        """After each step; ``last``: an epoch (or the run) ends here, so that losses must be exchanged."""
        self._sum = self._sum + loss
        self._rows += rows
        if last or position.iteration % self._log_every == 0:
            self._close_window(position, epoch, lr)
            if last or position.iteration >= self._next:
                self._exchange(position)
        self._say(position, epoch)

    def evaluated(self, position: Position, epoch: float, score: Score) -> None:
        """After each evaluation."""
        record = {
            "iteration": position.iteration,
            "epoch": epoch,
            "wall_s": position.seconds,
            "eval_accuracy": score.accuracy,
            "eval_loss": score.loss,
        }
        self._write(record)
        if self._show:
            self._show({**record, "total": self._total, "train_loss": self.train_loss})

    def begin_epoch(self) -> None:
        self._epoch_loss = (0.0, 0)

    def _close_window(self, position: Position, epoch: float, lr: float) -> None:
        mark = (
            self._clock.now(),
            self._session.bytes_sent(self._model),
            self._session.stall_seconds(self._model),
        )
        elapsed, sent, stall = (new - old for new, old in zip(mark, self._mark, strict=True))
        window = Window(position.iteration, epoch, position.seconds, float(self._sum), self._rows)
        window.elapsed, window.sent, window.stall, window.lr = elapsed, int(sent), stall / self._clock.dilation, lr
        self._pending.append(window)
        self._mark, self._sum, self._rows = mark, 0.0, 0

    def _exchange(self, position: Position) -> None:
        """Collective: every rank's windows to every rank."""
        now = self._clock.now()
        rate = (position.iteration - self._exchanged[0]) / max(now - self._exchanged[1], 1e-9)
        mine = {"rate": rate, "windows": [asdict(window) for window in self._pending]}
        everyone = self._session.gather(mine)
        self._pending = []
        self._exchanged = (position.iteration, now)
        self._next = position.iteration + max(self._log_every, math.ceil(everyone[0]["rate"] * self._interval))
        for windows in zip(*(each["windows"] for each in everyone), strict=True):
            self._record([Window(**window) for window in windows])

    def _record(self, windows: list[Window]) -> None:
        first = windows[0]
        loss, rows = sum(w.loss for w in windows), sum(w.rows for w in windows)
        self._epoch_loss = (self._epoch_loss[0] + loss, self._epoch_loss[1] + rows)
        self.train_loss = self._epoch_loss[0] / self._epoch_loss[1]
        elapsed = max(first.elapsed, 1e-9)
        self._figures = {
            "train_loss": loss / rows,
            "images_per_second": rows / elapsed,
            "mb_per_second": sum(w.sent for w in windows) / len(windows) / elapsed / 1e6,
            "stall_share": sum(w.stall / max(w.elapsed, 1e-9) for w in windows) / len(windows),
        }
        if not self._has_values:
            self._figures |= {"train_loss": None}
        if not self._counted:
            self._figures |= {"mb_per_second": None, "stall_share": None}
        place = {"iteration": first.iteration, "epoch": first.epoch, "wall_s": first.seconds}
        self._write({**place, **self._figures, "lr": first.lr})

    def _write(self, record: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(record)

    def _say(self, position: Position, epoch: float) -> None:
        now = time.monotonic()
        if self._show and (now - self._shown >= INTERVAL or position.iteration == self._total):
            self._shown = now
            place = {"iteration": position.iteration, "total": self._total, "epoch": epoch}
            self._show({**place, **self._figures})
