"""Project Adam's way: factors go up to the layer's owner, who multiplies them, and the whole matrix comes down (P15,
section 4.2; P17, table 1). A baseline: the owner of a large layer sends it to everyone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from poseidon.planning import Unit
from poseidon.schemes.base import Context, Contribution
from poseidon.schemes.memory import raw
from poseidon.schemes.sfb import SFB
from poseidon.transport import Header, Kind


class Adam(SFB):
    """One weight's factors on the way up, its averaged gradient on the way down."""

    name, what = "Project Adam's scheme", "factors"

    def __init__(self, unit: Unit, context: Context) -> None:
        super().__init__(unit, context)
        self._owner = unit.pairs[0].server

    def peers(self) -> Iterable[int]:
        return () if self._owner == self._context.rank else (self._owner,)

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.PULL_NONE:
            self.hand_on(header, payload, self._beside)
            self._finish(header.round, None)
        elif header.kind is Kind.PULL:
            if header.total != self.unit.nbytes:
                raise RuntimeError(f"matrix of unit {self.unit.index} has {header.total} bytes, not {self.unit.nbytes}")
            self.hand_on(header, payload, self._beside)
            data = self.assemble(header, payload)
            if data is not None:
                matrix = self.as_matrix(data)
                # A copy where it is handed on: the user may change it meanwhile.
                self._finish(header.round, matrix.clone() if self._beside else matrix)
        else:
            self.receive(header, payload)

    def waits_for(self) -> list[tuple[str, int]]:
        if self._owner == self._context.rank:
            return super().waits_for()
        return [self.missing("averaged gradient", self._owner)] if self._contributed else []

    def add(self, round_: int, rank: int, contribution: Contribution) -> None:
        """Of the owner: what has come takes its host as long as adding up a matrix; the others only send."""
        if self._owner == self._context.rank:
            nothing = contribution.dense is None and contribution.factors is None
            self._context.summed(0 if nothing else self.unit.nbytes, partial(super().add, round_, rank, contribution))

    def complete(self, round_: int, contributions: list[Contribution]) -> None:
        context = self._context
        result = context.multiplied(contributions, torch.Size(self.unit.shape), context.dtype)
        kind = Kind.PULL_NONE if result is None else Kind.PULL
        header = Header(kind, context.rank, context.model, context.plan, round_, unit=self.unit.index)
        data = memoryview(b"") if result is None else raw(result.view(-1))
        self.send(super().peers(), header, data)
        if context.topology.works(context.rank):
            # A copy: the user may change it while it is being sent.
            self._finish(round_, None if result is None else result.clone())

    def _finish(self, round_: int, result: torch.Tensor | None) -> None:
        self._contributed.pop(round_, None)
        self._context.done(round_, self.unit.index, result)
