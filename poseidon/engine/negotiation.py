"""How all ranks come to the same plan: rank 0 chooses from what every rank has seen, and tells the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.engine.exchange import Exchange
from poseidon.engine.plan import Options
from poseidon.engine.start import TAG_PLAN, TAG_SEEN
from poseidon.planning import Decision, FactorSize, Param, Rates, Timing, decide


def negotiate(
    exchange: Exchange,
    model: int,
    options: Options,
    params: Sequence[Param],
    seen: Mapping[str, FactorSize],
    buffers: Sequence[str],
    timing: Timing | None,
    sparse: Rates | bool,
) -> tuple[Decision, list[str]]:
    """Collective, after a round by PS.

    Args:
        seen: this rank's factors of that round, by name of the weight.
        buffers: on rank 0, names of those that training changes and may read; on others unused.
        timing: on rank 0, what comm.rule=time goes by; else None.
        sparse: on rank 0, whether factors are coded, see :func:`poseidon.planning.decide`.

    Returns:
        What all go by from now on, and rank 0's `buffers`.

    Raises:
        PeerLostError: a rank was lost or silent.
    """
    if exchange.rank:
        exchange.say(0, model, TAG_SEEN, json.dumps(seen))
        schemes, factors, rates, coded, theirs = json.loads(exchange.hear(0, model, TAG_PLAN, "plan"))
        return Decision(schemes, _sizes(factors), rates, coded), theirs
    everyone = [dict(seen)]
    for peer in range(1, exchange.world_size):
        everyone.append(_sizes(json.loads(exchange.hear(peer, model, TAG_SEEN, "rows of iteration 0"))))
    decision = decide(options.comm, params, everyone, exchange.topology, timing, options.overlap, sparse)
    text = json.dumps([decision.schemes, decision.factors, decision.rates, decision.sparse, buffers])
    for peer in range(1, exchange.world_size):
        exchange.say(peer, model, TAG_PLAN, text)
    return decision, list(buffers)


def _sizes(given: Mapping[str, Sequence[Any]]) -> dict[str, FactorSize]:
    return {name: FactorSize(*size) for name, size in given.items()}
