"""Which scheme a layer takes: decided once, by rank 0, from the rows that iteration 0 really had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.planning.book import Book, FactorSize, Param
from poseidon.planning.cost import Scheme, adam_floats, best_scheme, block_floats, ps_floats, sfb_floats


@dataclass(frozen=True)
class Decision:
    """What rank 0 tells the others.

    Attributes:
        schemes: scheme per parameter that can travel as factors; all others go by PS.
        factors: size of its factors per such parameter (rows: the mean over ranks, rounded up).
    """

    schemes: dict[str, Scheme]
    factors: dict[str, FactorSize]


def decide(comm: str, params: Sequence[Param], seen_by_rank: Sequence[Mapping[str, FactorSize]]) -> Decision:
    """Choose the scheme of every factorable weight.

    Args:
        comm: ``ps``, ``sfb`` or ``hybrid`` (the papers' rule).
        seen_by_rank: per rank, the factors of each weight whose gradient was, on that rank in iteration 0,
            purely their product. A weight missing on any rank (also used elsewhere, accumulated, unused) has
            no factors to send there and goes by PS.
    """
    world_size = len(seen_by_rank)
    schemes: dict[str, Scheme] = {}
    factors: dict[str, FactorSize] = {}
    for param in params:
        if not param.factors or any(param.name not in seen for seen in seen_by_rank):
            continue
        sizes = [seen[param.name] for seen in seen_by_rank]
        k = -(-sum(size.rows for size in sizes) // world_size)
        factors[param.name] = FactorSize(k, max(size.itemsize for size in sizes))
        m, n = param.shape
        if comm == "sfb":
            schemes[param.name] = "sfb"
        elif comm == "hybrid":
            schemes[param.name] = best_scheme(m, n, k, world_size, world_size)
        else:
            schemes[param.name] = "ps"
    return Decision(schemes, factors)


def describe(book: Book, factors: Mapping[str, FactorSize], rank: int) -> list[dict[str, Any]]:
    """One row per parameter, in the model's order: what travels how, in floats per node (both directions)."""
    result: list[dict[str, Any]] = []
    for index, param in enumerate(book.params):
        unit = book.units[book.unit_of[index]]
        k = factors[param.name].rows if param.name in factors else None
        m, n = param.shape if param.factors else (param.numel, 1)
        p = book.world_size
        result.append(
            {
                "layer": param.layer,
                "param": param.name,
                "type": param.layer_type,
                "shape": list(param.shape),
                "rows": k,
                "scheme": unit.scheme,
                "floats_ps": ps_floats(m, n, p, p),
                "floats_sfb": sfb_floats(m, n, k, p) if k else None,
                "floats_adam": adam_floats(m, n, k, p) if k else None,
                "floats_block": block_floats(m, n, k, p) if k else None,
                "unit": unit.index,
                "merged": unit.merged,
                "servers": sorted({pair.server for pair in unit.pairs}),
                "planned_bytes": book.unit_bytes(unit, rank, factors) * param.numel / max(1, _values(book, unit.index)),
            }
        )
    return result


def _values(book: Book, unit: int) -> int:
    return sum(book.params[i].numel for i in book.units[unit].params)
