"""An engine's figures as plain data: plan, schemes, bytes. Of the present plan: rounds by PS that precede a plan
are left out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

from torch import nn

from poseidon.engine.exchange import Exchange
from poseidon.planning import Book, Decision, describe, schemes_by_layer
from poseidon.transport.frames import HEADER_BYTES


class Planned(Protocol):
    """What goes by a plan of ours, as far as its figures need it; see :class:`poseidon.engine.engine.Engine`."""

    @property
    def book(self) -> Book: ...
    @property
    def decision(self) -> Decision: ...
    @property
    def trial(self) -> bool: ...
    @property
    def plan_version(self) -> int: ...
    @property
    def plan_rounds(self) -> int: ...
    @property
    def planned_rounds(self) -> int: ...
    @property
    def stall_seconds(self) -> float: ...


def uncounted(model: nn.Module, scheme: str, sent: float) -> dict[str, Any]:
    """The same figures of a model that no engine synchronises: a node sends so many bytes per iteration, computed."""
    layers = {name.rpartition(".")[0] or "(root)" for name, p in model.named_parameters() if p.requires_grad}
    return {
        "schemes": dict.fromkeys(sorted(layers), scheme),
        "plan": [],
        "bytes_sent_per_iteration": sent,
        "bytes_dense_per_iteration": sent,
        "bytes_planned_per_iteration": sent,
        "bytes_inside_per_iteration": 0.0,
        "bytes_inside_planned_per_iteration": 0.0,
        "bytes_source": "computed",
        "traffic": {},
        "stall_seconds": 0.0,
        "strangers": {"frames": 0, "connections": 0},
    }


def report(engine: Planned, exchange: Exchange, model: int) -> dict[str, Any]:
    """This rank's figures; bytes are payload sent (`dense`), with headers (`sent`), and as the plan says: to other
    nodes, and, `inside`, to other devices of its own."""
    book, factors = engine.book, engine.decision.factors
    iterations = 0 if engine.trial else engine.plan_rounds
    traffic = exchange.traffic
    dense = sent = inside = 0
    beside = exchange.topology.beside(exchange.rank)
    layers: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for direction, counter in (("sent", traffic.sent), ("received", traffic.received)):
        for (its_model, plan, unit_index, _, peer), count in list(counter.items()):
            if its_model != model or plan != engine.plan_version or engine.trial or peer in beside:
                continue
            unit = book.units[unit_index]
            values = sum(book.params[i].numel for i in unit.params) or 1
            for i in unit.params:
                param = book.params[i]
                layers[param.layer or "(root)"][unit.scheme][direction] += count * param.numel / values
    for key, count in list(traffic.sent.items()):
        if key[0] == model and key[1] == engine.plan_version and not engine.trial:
            if key[4] in beside:
                inside += count
                continue
            dense += count
            sent += count + HEADER_BYTES * traffic.messages[key]
    planned = book.planned_bytes(exchange.rank, factors)
    plan_rows = describe(book, factors, exchange.rank)
    return {
        "schemes": schemes_by_layer(plan_rows),
        "plan": plan_rows,
        "iterations": iterations,
        "bytes_sent_per_iteration": sent / iterations if iterations else 0.0,
        "bytes_dense_per_iteration": dense / iterations if iterations else 0.0,
        "bytes_planned_per_iteration": planned.between,
        "bytes_inside_per_iteration": inside / iterations if iterations else 0.0,
        "bytes_inside_planned_per_iteration": planned.inside,
        "bytes_source": "counted",
        "traffic": {layer: {s: dict(d) for s, d in by.items()} for layer, by in layers.items()},
        "stall_seconds": engine.stall_seconds / engine.planned_rounds if engine.planned_rounds else 0.0,
        "strangers": {
            "frames": exchange.endpoint.counters.stranger_frames,
            "connections": exchange.endpoint.counters.stranger_connections,
        },
    }
