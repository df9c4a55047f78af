"""A plan as a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poseidon.config.schema import Format
from poseidon.planning.totals import WAYS, LayerRow

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = {"ps": "PS", "sfb": "SFB", "rows": "rows", "adam": "Adam", "block": "block"}
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Plan:
    """How the layers of a model travel, and what that costs.

    Attributes:
        rule: how comm=hybrid chose: paper, time or recorded; None for other comms.
        batch_size: rows per node and iteration.
        parameters: numbers that are trained.
        rows: per layer.
        totals: floats per node and iteration, both directions, by way; see :func:`poseidon.planning.totals`.
        bytes_sent_per_node: payload that the node which sends most sends per iteration.
        rates: of the cluster, where comm.rule=time or comm.sparse=auto went by them.
        measures: a training would first measure rates, and may choose otherwise.
        sparse: weights whose factors are coded (``bytes_sent_per_node`` counts them so, floats do not).
    """

    model: str
    comm: str
    rule: str | None
    nodes: int
    devices_per_node: int
    batch_size: int
    parameters: int
    rows: list[LayerRow]
    totals: dict[str, float]
    bytes_sent_per_node: float
    rates: dict[str, Any] | None = None
    measures: bool = False
    sparse: Sequence[str] = ()

    def scheme(self, row: LayerRow) -> str:
        return self.comm if self.comm in ("ddp", "fsdp") else row.scheme


def render(plan: Plan, form: Format) -> str:
    """The plan in one of its forms, as text."""
    if form is Format.json:
        return json.dumps(as_dict(plan), indent=2) + "\n"
    if form is Format.csv:
        return _csv(plan)
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False)
    console.print(table(plan))
    for line in conclusion(plan):
        console.print(line)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def as_dict(plan: Plan) -> dict[str, Any]:
    """As plain containers: floats per node and iteration, both directions."""
    return {
        "model": plan.model,
        "comm": plan.comm,
        "rule": plan.rule,
        "nodes": plan.nodes,
        "devices_per_node": plan.devices_per_node,
        "batch_size": plan.batch_size,
        "parameters": plan.parameters,
        "layers": [
            {
                "layer": row.layer,
                "type": row.type,
                "params": list(row.params),
                "shape": list(row.shape),
                "rows": row.rows,
                "rows_at_most": row.embedding,
                **{f"floats_{way}": row.floats[way] for way in WAYS},
                "scheme": plan.scheme(row),
            }
            for row in plan.rows
        ],
        "floats_per_node": plan.totals,
        "bytes_sent_per_node": plan.bytes_sent_per_node,
        "rates": plan.rates,
    }


def _csv(plan: Plan) -> str:
    out = io.StringIO()
    layers = as_dict(plan)["layers"]
    writer = csv.DictWriter(out, list(layers[0]), lineterminator="\n")
    writer.writeheader()
    for layer in layers:
        writer.writerow({**layer, "params": " ".join(layer["params"]), "shape": "x".join(map(str, layer["shape"]))})
    return out.getvalue()


def table(plan: Plan) -> Table:
    """A row per layer, and totals per node; of an embedding, K is the most rows that can be touched."""
    from rich.table import Table

    ways = [way for way in WAYS if way != "rows" or _has_embeddings(plan)]
    rule = f", comm.rule={plan.rule}" if plan.rule else ""
    result = Table(
        title=f"{plan.model}: {plan.parameters:,} parameters, {plan.nodes} nodes, {plan.batch_size} rows per node, "
        f"comm={plan.comm}{rule}",
        caption="millions of floats that a node sends and receives per iteration",
        show_footer=False,
    )
    for heading in ("layer", "type", "shape"):
        result.add_column(heading)
    for heading in ("K", *(_HEADINGS[way] for way in ways)):
        result.add_column(heading, justify="right")
    result.add_column("scheme")
    for row in plan.rows:
        costs = [_millions(row.floats[way]) for way in ways]
        shape = " x ".join(map(str, row.shape))
        k = f"{'<= ' if row.embedding else ''}{row.rows}" if row.rows else "-"
        result.add_row(row.layer, row.type, shape, k, *costs, plan.scheme(row))
    result.add_section()
    chosen = plan.totals["chosen"]
    all_ways = [plan.totals[way] for way in ways]
    result.add_row("all layers, one way *", "", "", "", *map(_millions, all_ways), _millions(chosen))
    result.add_row("in GB (fp32)", "", "", "", *map(_gigabytes, all_ways), _gigabytes(chosen))
    return result


def conclusion(plan: Plan) -> list[str]:
    """What the table leaves to say."""
    sent, all_ps = plan.bytes_sent_per_node, plan.totals["ps"]
    share = f", {plan.totals['chosen'] / all_ps:.3g} of what all-PS takes" if all_ps else ""
    lines = [
        f"comm={plan.comm}: the busiest node sends {_significant(sent / 1e6)} MB per iteration{share}",
        "* layers with K that way, the rest by PS; last column: as chosen. Adam: the node that moves most; PS, SFB,",
        "  block: every node. K: rows that a layer sees per node and iteration; without K, PS is the only way",
    ]
    if plan.measures:
        lines += [
            "  comm.rule=time: a training measures rates first, and takes what is clearly faster by them; here it is",
            "  the papers' choice. By known rates: hardware=titan_x cluster=emulated cluster.bandwidth=10gbit",
        ]
    if plan.sparse:
        lines.append(f"  sparse factors, coded: {', '.join(plan.sparse)}; MB count them so, floats do not")
    if _has_embeddings(plan):
        lines.append("  rows: embeddings send the rows that were looked up, at most K; all else by PS")
    return lines


def _has_embeddings(plan: Plan) -> bool:
    return any(row.embedding for row in plan.rows)


def _millions(floats: float | None) -> str:
    return "-" if floats is None else _significant(floats / 1e6)


def _gigabytes(floats: float) -> str:
    return _significant(floats * _FLOAT / 1e9)


def _significant(value: float) -> str:
    """Three significant digits, never with an exponent."""
    if not value:
        return "0"
    text = f"{value:#.3g}"
    if "e" in text:
        text = f"{float(text):,.0f}" if value > 1 else f"{float(text):.10f}".rstrip("0")
    return text.rstrip(".")
