"""How all ranks come to the same plan: rank 0 chooses from what every rank has seen, and tells the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.engine.basis import Basis
from poseidon.engine.exchange import Exchange
from poseidon.engine.start import TAG_PLAN, TAG_SEEN
from poseidon.errors import UserError
from poseidon.planning import Decision, FactorSize, Param


def negotiate(
    exchange: Exchange,
    model: int,
    basis: Basis,
    params: Sequence[Param],
    seen: Mapping[str, FactorSize],
    buffers: Sequence[str],
) -> tuple[Decision, list[str]]:
    """Collective, after a round by PS.

    Args:
        basis: of the choice; rank 0's counts.
        seen: this rank's factors of that round, by name of the weight.
        buffers: on rank 0, names of those that training changes and may read; on others unused.

    Returns:
        What all go by from now on, and rank 0's `buffers`.

    Raises:
        UserError: a weight cannot go as a recorded plan says; on every rank.
        PeerLostError: a rank was lost or silent.
    """
    if exchange.rank:
        exchange.say(0, model, TAG_SEEN, json.dumps(seen))
        error, schemes, factors, rates, coded, theirs = json.loads(exchange.hear(0, model, TAG_PLAN, "plan"))
        if error:
            raise UserError(error)
        return Decision(schemes, _sizes(factors), rates, coded), theirs
    everyone = [dict(seen)]
    for peer in range(1, exchange.world_size):
        everyone.append(_sizes(json.loads(exchange.hear(peer, model, TAG_SEEN, "rows of iteration 0"))))
    error, decision = None, Decision({}, {})
    try:
        decision = basis.decide(params, everyone, exchange)
    except UserError as failure:
        error = failure
    told = [decision.schemes, decision.factors, decision.rates, decision.sparse, buffers]
    text = json.dumps([str(error or ""), *told])
    for peer in range(1, exchange.world_size):
        exchange.say(peer, model, TAG_PLAN, text)
    if error is not None:
        raise error
    return decision, list(buffers)


def _sizes(given: Mapping[str, Sequence[Any]]) -> dict[str, FactorSize]:
    return {name: FactorSize(*size) for name, size in given.items()}
