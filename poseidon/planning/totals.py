"""A plan in rows per layer and in totals per node: what ``poseidon plan`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.planning.cost import adam_floats, adam_worker_floats

#: Ways that all linear layers could go ("rows": all embeddings), in the order of the columns; the rest goes by PS.
WAYS = ("ps", "sfb", "rows", "adam", "block")


@dataclass(frozen=True)
class LayerRow:
    """One layer, or what is small of several.

    Attributes:
        params: of the layer's parameters, the names.
        shape: of its weight; M x N for a linear layer. [] for a row of several tensors.
        rows: K, the rows that it sees on one node and iteration, of an embedding: different ones that are touched;
            None where neither factors nor rows are a choice.
        floats: per node and iteration, both directions, by :data:`WAYS`; None where a way is no choice.
            Of "adam", at the node that owns the layer.
    """

    layer: str
    type: str
    params: tuple[str, ...]
    shape: tuple[int, ...]
    rows: int | None
    floats: dict[str, float | None]
    scheme: str

    @property
    def factors(self) -> bool:
        """Is it a linear layer that may travel as factors?"""
        return self.rows is not None and not self.embedding

    @property
    def embedding(self) -> bool:
        return self.floats["rows"] is not None


def by_layer(rows: Sequence[Mapping[str, Any]]) -> list[LayerRow]:
    """A row per layer, in the model's order, from :func:`~poseidon.planning.describe`'s row per parameter.

    A weight that may travel as factors has a row of its own, with the numbers of the papers' tables; the biases
    of such layers, which always go by PS, follow together in the last row.
    """
    split = {row["layer"] for row in rows if row["rows"] is not None}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    biases = []
    for row in rows:
        if row["layer"] in split and row["rows"] is None:
            biases.append(row)
        else:
            groups.setdefault(row["layer"], []).append(row)
    result = [_merge(layer or "(root)", members) for layer, members in groups.items()]
    if biases:
        result.append(_merge("(biases of the layers with K)", biases, several=True))
    return result


def _merge(layer: str, members: Sequence[Mapping[str, Any]], several: bool = False) -> LayerRow:
    largest = max(members, key=lambda row: row["floats_ps"])
    floats: dict[str, float | None] = {way: largest[f"floats_{way}"] for way in WAYS}
    if len(members) > 1 or several:
        floats["ps"] = sum(row["floats_ps"] for row in members)
    return LayerRow(
        layer,
        "" if several else str(largest["type"]),
        tuple(row["param"] for row in members),
        () if several else tuple(largest["shape"]),
        largest["rows"],
        floats,
        largest["scheme"],
    )


def totals(rows: Sequence[LayerRow], nodes: int) -> dict[str, float]:
    """Floats per node and iteration, both directions, if all layers with K went one way and the rest by PS.

    "adam" is the node that moves most: owners are dealt to the nodes, the largest layer first, each to the node
    that has least so far; the owner of a layer also works for the layers of the others. "chosen" is the plan's.
    """
    result = {way: sum(_or_ps(row, way) for row in rows) for way in WAYS if way != "adam"}
    result["adam"] = _adam(rows, nodes)
    result["chosen"] = (
        result["adam"] if any(row.scheme == "adam" for row in rows) else sum(_or_ps(row, row.scheme) for row in rows)
    )
    return result


def _or_ps(row: LayerRow, way: str) -> float:
    floats = row.floats.get(way)
    return floats if floats is not None else (row.floats["ps"] or 0.0)


def _adam(rows: Sequence[LayerRow], nodes: int) -> float:
    dense = sum(_or_ps(row, "ps") for row in rows if not row.factors)
    load = [0.0] * nodes
    layers = sorted((row for row in rows if row.factors), key=lambda row: row.shape[0] * row.shape[1], reverse=True)
    for row in layers if nodes > 1 else ():
        m, n = row.shape
        k = row.rows or 0
        owner = min(range(nodes), key=lambda node: (load[node], node))
        for node in range(nodes):
            load[node] += adam_floats(m, n, k, nodes) if node == owner else adam_worker_floats(m, n, k)
    return dense + max(load)
