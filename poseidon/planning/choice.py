"""Which scheme a layer takes: decided once, by rank 0, from the rows that iteration 0 really had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.planning.book import Book, FactorSize, Param
from poseidon.planning.cost import (
    Scheme,
    adam_floats,
    best_of_embedding,
    best_scheme,
    block_floats,
    ps_busiest_floats,
    rows_floats,
    sfb_floats,
)
from poseidon.planning.recorded import Recorded
from poseidon.planning.sparse import worth_coding
from poseidon.planning.time import Rates, Timing, choose
from poseidon.planning.timeline import Overlap
from poseidon.planning.topology import Topology

#: What every linear layer goes by under a comm that does not choose.
_ALL: dict[str, Scheme] = {"sfb": "sfb", "project_adam": "adam", "block": "block"}
#: Comms under which factors may be sent.
FACTORED = ("hybrid", *_ALL)


@dataclass(frozen=True)
class Decision:
    """What rank 0 tells the others.

    Attributes:
        schemes: scheme per parameter that can travel as factors or rows; all others go by PS.
        factors: size of its factors per such parameter (rows: the mean over nodes, rounded up).
        rates: of the cluster, where they were what decided.
        sparse: weights whose factors are coded.
    """

    schemes: dict[str, Scheme]
    factors: dict[str, FactorSize]
    rates: dict[str, Any] | None = None
    sparse: list[str] = field(default_factory=list)


def decide(
    comm: str,
    params: Sequence[Param],
    seen_by_rank: Sequence[Mapping[str, FactorSize]],
    topology: Topology,
    timing: Timing | None = None,
    overlap: Overlap = "backward",
    recorded: Recorded | None = None,
    sparse: Rates | bool = False,
) -> Decision:
    """Choose the scheme of every weight that can travel otherwise than whole.

    An embedding goes as rows where that moves fewer floats, whatever the comm, ``downpour`` excepted, whose servers
    give whole slices back. Where there is but one node, nothing leaves it: the rule then takes its devices for nodes.

    Args:
        comm: ``ps``, ``sfb``, ``hybrid`` (the papers' rule, or `timing`), ``block``, ``project_adam`` or ``downpour``.
        seen_by_rank: per rank, the factors of each weight whose gradient was, on that rank in iteration 0,
            purely their product. A weight missing on any rank (also used elsewhere, accumulated, unused) has
            no factors to send there and goes by PS. An embedding that was not used has 0 rows.
        timing: hybrid chooses by predicted time (comm.rule=time), unless there is but one node.
        overlap: what communication hides under.
        recorded: a plan that hybrid goes by again.
        sparse: whether factors are coded; on a cluster of these rates: where they are up earlier for it.

    Raises:
        UserError: a weight cannot go as recorded.
    """
    ranks, nodes = len(seen_by_rank), len(topology.nodes)
    schemes: dict[str, Scheme] = {} if comm == "downpour" else compulsory(params)
    factors: dict[str, FactorSize] = {}
    for param in params:
        sizes = [seen[param.name] for seen in seen_by_rank if param.name in seen]
        k = -(-sum(size.rows for size in sizes) // nodes)
        if not param.counted and (not param.factors or len(sizes) < ranks or (param.factors == "rows" and not k)):
            continue
        shares = [_mean(sizes, [size.u for size in sizes]), _mean(sizes, [size.v for size in sizes])]
        factors[param.name] = FactorSize(k, max((size.itemsize for size in sizes), default=param.itemsize), *shares)
        if not param.counted and comm != "downpour":
            schemes[param.name] = _choose(comm, param, k if nodes > 1 else -(-k // ranks), topology)
    rates = None
    if comm == "hybrid" and recorded is not None:
        schemes |= _as_recorded(recorded, params, schemes)
    elif comm == "hybrid" and timing is not None and nodes > 1:
        linear = {param.name for param in params if param.factors == "linear"}
        choices = {name: size for name, size in factors.items() if name in linear and size.rows}
        schemes |= choose(params, choices, timing, topology, overlap, schemes, sparse=sparse is not False)
        rates = timing.rates
    coded: list[str] = []
    if sparse is not False:
        known = None if sparse is True else sparse
        coded = worth_coding(params, schemes, factors, topology, known)
        rates = rates or known
    return Decision(schemes, factors, rates.as_dict() if rates is not None else None, coded)


def _as_recorded(recorded: Recorded, params: Sequence[Param], schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Raises UserError: a weight cannot go so."""
    wanted = {param.name: recorded.schemes[param.name] for param in params if param.name in recorded.schemes}
    left_out = next((name for name, scheme in wanted.items() if scheme != "ps" and name not in schemes), None)
    if left_out is not None:
        raise recorded.left_out(left_out)
    return {name: wanted[name] for name in schemes if name in wanted}


def _mean(sizes: Sequence[FactorSize], shares: Sequence[float]) -> float:
    """Over the rows of all."""
    rows = sum(size.rows for size in sizes)
    return sum(size.rows * share for size, share in zip(sizes, shares, strict=True)) / rows if rows else 1.0


def compulsory(params: Sequence[Param]) -> dict[str, Scheme]:
    """The schemes that are no choice, whatever was seen."""
    return {param.name: "rows" for param in params if param.counted}


def _choose(comm: str, param: Param, k: int, topology: Topology) -> Scheme:
    (m, n), parties = param.shape, topology.parties
    if param.factors == "rows":
        return best_of_embedding(m, n, k, *parties)
    if comm == "hybrid":
        return best_scheme(m, n, k, *parties)
    return _ALL.get(comm, "ps")


def describe(book: Book, factors: Mapping[str, FactorSize], rank: int) -> list[dict[str, Any]]:
    """One row per parameter, in the model's order: what travels how, in floats per node (both directions).

    "rows" is K: the factor's rows of a linear layer, or the different rows of an embedding that were touched; the
    mean over nodes, rounded up.
    """
    result: list[dict[str, Any]] = []
    for index, param in enumerate(book.params):
        unit = book.units[book.unit_of[index]]
        k = factors[param.name].rows if param.name in factors else None
        m, n = param.shape if param.factors else (param.numel, 1)
        p, servers, dedicated = book.topology.parties if len(book.topology.nodes) > 1 else (1, 1, False)
        linear = k if param.factors == "linear" else None
        result.append(
            {
                "layer": param.layer,
                "param": param.name,
                "type": param.layer_type,
                "shape": list(param.shape),
                "rows": k,
                "scheme": unit.scheme,
                "floats_ps": ps_busiest_floats(m, n, p, servers, dedicated),
                "floats_sfb": sfb_floats(m, n, linear, p) if linear else None,
                "floats_rows": rows_floats(n, k, p) if k is not None and param.factors == "rows" else None,
                "floats_adam": adam_floats(m, n, linear, p) if linear else None,
                "floats_block": block_floats(m, n, linear, p, servers, dedicated) if linear else None,
                "unit": unit.index,
                "merged": unit.merged,
                "nodes": [len(node) for node in book.topology.nodes],
                "servers": sorted({pair.server for pair in unit.pairs}),
                "planned_bytes": book.unit_bytes(unit, rank, factors).between
                * param.numel
                / max(1, _values(book, unit.index)),
            }
        )
    return result


def schemes_by_layer(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """From :func:`describe`'s rows: a layer is named after its weight's scheme; its bias is small and goes by PS."""
    schemes: dict[str, str] = {}
    for row in rows:
        layer = row["layer"] or "(root)"
        if row["scheme"] != "ps" or layer not in schemes:
            schemes[layer] = row["scheme"]
    return schemes


def _values(book: Book, unit: int) -> int:
    return sum(book.params[i].numel for i in book.units[unit].params)
