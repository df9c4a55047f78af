"""What the ranks choose schemes by, and what they code: the papers' rule, rates that are known or measured, or a
recorded plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from poseidon.engine.device import Device
from poseidon.engine.exchange import Exchange
from poseidon.engine.parameters import trainable
from poseidon.engine.plan import Options
from poseidon.engine.rates import measure
from poseidon.engine.start import TAG_RECORDED
from poseidon.errors import UserError
from poseidon.planning import (
    FACTORED,
    Decision,
    FactorSize,
    Param,
    Rates,
    Recorded,
    Timing,
    decide,
    read_plan,
    recorded_plan,
)

log = logging.getLogger("poseidon")

#: Bytes of all linear layers together below which no choice among schemes is worth measuring rates for.
_WORTH = 1024 * 1024


@dataclass(frozen=True)
class Basis:
    """The same on all ranks, but for the layers' times."""

    options: Options
    timing: Timing | None = None
    recorded: Recorded | None = None
    sparse: Rates | bool = False  # are factors coded? see decide()

    def observed(self, backward: Mapping[str, float]) -> Basis:
        """With the layers' times in the first iteration, unless they were known."""
        if self.timing is None or self.timing.backward:
            return self
        return replace(self, timing=replace(self.timing, backward=backward))

    def decide(self, params: Sequence[Param], seen: Sequence[Mapping[str, FactorSize]], exchange: Exchange) -> Decision:
        """Args and errors: see :func:`poseidon.planning.decide`."""
        options = self.options
        how = self.timing, options.overlap, self.recorded, self.sparse
        return decide(options.comm, params, seen, exchange.topology, *how)


def basis_of(
    exchange: Exchange,
    index: int,
    model: nn.Module,
    options: Options,
    device: Device,
    timing: Timing | None,
    plan: str | Mapping[str, Any] | Sequence[Any] | None,
) -> Basis:
    """Collective; measures what is not known.

    Args:
        timing: known, equal on all ranks.
        plan: to go by again; rank 0's counts.

    Raises:
        UserError: no plan for this model on these nodes; the same on every rank.
    """
    infos = trainable(model)[1]
    several = len(exchange.topology.nodes) > 1
    replays = options.comm == "hybrid" and options.replays
    by_time = several and options.comm == "hybrid" and options.rule == "time" and not replays
    auto = several and options.comm in FACTORED and options.sparse == "auto"
    if timing is None and (by_time or auto) and sum(p.nbytes for p in infos if p.factors == "linear") >= _WORTH:
        if by_time and (device.where.type == "cuda" or not device.has_values):
            # A GPU's kernels run after the hooks that would time them; an emulated one does not work as this host does.
            by_time = False
            if exchange.rank == 0:
                log.info("rule=time: an accelerator's seconds per layer are not known, so the papers' rule chooses")
        if by_time or (auto and device.has_values):
            timing = Timing(measure(exchange, index, device.where, products=by_time), {}, {})
    sparse = timing.rates if auto and timing is not None else options.sparse == "always"
    recorded = _share(exchange, index, model, infos, plan) if replays else None
    return Basis(options, timing if by_time else None, recorded, sparse)


def _share(exchange: Exchange, index: int, model: nn.Module, infos: Sequence[Param], plan: Any) -> Recorded:
    """Rank 0's plan, or its error, everywhere."""
    if exchange.rank:
        error, *content = json.loads(exchange.hear(0, index, TAG_RECORDED, "the recorded plan"))
        if error:
            raise UserError(error)
        source, schemes, shapes, nodes = content
        return Recorded(source, schemes, {name: tuple(shape) for name, shape in shapes.items()}, tuple(nodes))
    error, found = "", None
    try:
        found = read_plan(plan) if isinstance(plan, str) else recorded_plan(plan, "given")
        found.check({name for name, _ in model.named_parameters()}, infos, exchange.topology)
    except UserError as failure:
        error = str(failure)
    text = json.dumps([error] if error else [error, *vars(found).values()])
    for peer in range(1, exchange.world_size):
        exchange.say(peer, index, TAG_RECORDED, text)
    if error or found is None:
        raise UserError(error)
    return found
