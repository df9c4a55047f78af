"""One node of a symmetric cluster as queues, a device, its host's CPU, its link and the copies between device and host
each way, and the seconds that an iteration takes on them. What leaves a node takes the link's time; what enters mirrors
that.

Alternative: a formula, max(compute, wire) + tail. It cannot tell what hides under the backward pass: the last layers'
gradients come first and are the largest, and a block comes down only after all factors have gone up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

from poseidon.planning.events import Clock, Station, Together

Overlap = Literal["none", "backward", "full"]
#: The link looks for a more urgent transfer so many times an iteration.
PIECES = 200
#: Iterations until one is like the other, where the next forward pass begins before all is in.
ROUNDS = 5


class Stage(NamedTuple):
    """Of one layer, in order: seconds on the link, seconds of multiplying, seconds on the link.

    Attributes:
        where: what multiplies; "beside": the host adds up what the link carries meanwhile.
        hop: seconds until what has left is there.
        late: the product is wanted by the next forward pass only, so that the backward pass goes first.
        copy_out: seconds of copying to the host, before all else.
        copy_in: seconds of copying to the device, after all else but what it multiplies late.
    """

    up: float
    product: float = 0.0
    where: Literal["device", "host", "beside"] = "device"
    down: float = 0.0
    hop: float = 0.0
    late: bool = False
    copy_out: float = 0.0
    copy_in: float = 0.0

    def slower(self, factor: float) -> Stage:
        """With communication that takes so many times as long."""
        product = self.product if self.where == "device" else self.product * factor
        return self._replace(
            up=self.up * factor,
            product=product,
            down=self.down * factor,
            copy_out=self.copy_out * factor,
            copy_in=self.copy_in * factor,
        )


class Pass(NamedTuple):
    """A layer, in the model's order: seconds of its forward and its backward pass, and what follows that."""

    forward: float
    backward: float
    stage: Stage


def iteration_seconds(passes: Sequence[Pass], overlap: Overlap) -> float:
    """Seconds of one iteration, the optimizer step left out.

    Args:
        overlap: what communication hides under: nothing, the backward pass, or the next forward pass, too, layer by
            layer, the front layers' first.
    """
    run = _Run(passes, overlap)
    run.start()
    run.clock.run()
    ends = run.ends
    return ends[0] if overlap != "full" else (ends[-1] - ends[1]) / (len(ends) - 2)


class _Run:
    """Attributes:
    ends: of each iteration, when all of its gradients are in; where the next one begins earlier, when its backward
        pass ends.
    """

    def __init__(self, passes: Sequence[Pass], overlap: Overlap) -> None:
        self.clock = Clock()
        self.ends: list[float] = []
        self._passes, self._overlap = passes, overlap
        piece = sum(each.stage.up + each.stage.down for each in passes) / PIECES
        self._device, self._host = Station(self.clock), Station(self.clock)
        self._copy_out, self._copy_in = Station(self.clock), Station(self.clock)
        self._link = Station(self.clock, piece if overlap == "full" else math.inf)
        self._current = [-1] * len(passes)  # by layer, the iteration whose gradient is in
        self._blocked: tuple[int, int] | None = None  # iteration and layer of a forward pass that waits
        self._rounds = ROUNDS if overlap == "full" else 1

    def start(self) -> None:
        self._forward(0, 0)

    def _forward(self, round_: int, layer: int) -> None:
        if layer == len(self._passes):
            self._backward(round_, layer - 1)
        elif self._current[layer] < round_ - 1:
            self._blocked = (round_, layer)
        else:
            self._device.do(self._passes[layer].forward, partial(self._forward, round_, layer + 1), (1,))

    def _backward(self, round_: int, layer: int) -> None:
        def end() -> None:
            if self._overlap != "none":
                self._send(round_, layer)
            self._backward(round_, layer - 1)

        if layer >= 0:
            self._device.do(self._passes[layer].backward, end, (1,))
            return
        if self._overlap == "none":
            for each in reversed(range(len(self._passes))):
                self._send(round_, each)
        if self._overlap == "full":
            self.ends.append(self.clock.now)
            if round_ + 1 < self._rounds:
                self._forward(round_ + 1, 0)

    def _send(self, round_: int, layer: int) -> None:
        stage = self._passes[layer].stage
        urgency = (round_, layer) if self._overlap == "full" else ()
        together = Together(2 if stage.where == "beside" else 1, lambda: multiply())

        def up() -> None:
            self._link.do(stage.up, lambda: self.clock.after(stage.hop, together), urgency)
            if stage.where == "beside":
                self._host.do(stage.product, together)

        def multiply() -> None:
            if stage.where == "beside" or not stage.product:
                product()
            elif stage.late:
                self._copy_in.do(stage.copy_in, lambda: self._device.do(stage.product, done, (2, round_, layer)))
            else:
                (self._device if stage.where == "device" else self._host).do(stage.product, product, (0,))

        def product() -> None:
            if stage.down:
                self._link.do(stage.down, lambda: self.clock.after(stage.hop, down), urgency)
            else:
                down()

        def down() -> None:
            self._copy_in.do(stage.copy_in, done)

        def done() -> None:
            self._arrived(round_, layer)

        self._copy_out.do(stage.copy_out, up)

    def _arrived(self, round_: int, layer: int) -> None:
        self._current[layer] = round_
        if self._overlap != "full" and min(self._current) == round_:
            self.ends.append(self.clock.now)
        if self._blocked is not None and self._blocked == (round_ + 1, layer):
            self._blocked = None
            self._forward(round_ + 1, layer)
