"""An engine's figures as plain data: plan, schemes, bytes. Of the present plan: rounds by PS that precede a plan
are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from poseidon.engine.exchange import Exchange
from poseidon.planning import Book, Decision, Unit, describe, schemes_by_layer
from poseidon.transport.frames import HEADER_BYTES


class Standing(Protocol):
    """A plan, and how long it has held; see :class:`poseidon.engine.plan.Plan`."""

    @property
    def book(self) -> Book: ...
    @property
    def version(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def trial(self) -> bool: ...


class Planned(Protocol):
    """What goes by a plan of ours, as far as its figures need it; see :class:`poseidon.engine.engine.Engine`."""

    @property
    def plan(self) -> Standing: ...
    @property
    def decision(self) -> Decision: ...
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
        "rates": None,
        "bytes_sent_per_iteration": sent,
        "bytes_dense_per_iteration": sent,
        "bytes_planned_per_iteration": sent,
        "bytes_inside_per_iteration": 0.0,
        "bytes_inside_planned_per_iteration": 0.0,
        "from_servers": [],
        "bytes_source": "computed",
        "traffic": {},
        "stall_seconds": 0.0,
        "most_bytes_queued": 0,
        "most_bytes_in_flight": 0,
        "strangers": {"frames": 0, "connections": 0},
    }


def report(engine: Planned, exchange: Exchange, model: int) -> dict[str, Any]:
    """This rank's figures, ``most_...`` of all its models together; bytes are payload before any coding (`dense`), what
    was sent, with headers (`sent`), and as the plan says (before coding): to other nodes, and, `inside` (before
    coding), to other devices of its own.

    ``from_servers``: for each rank that only serves, what it has sent to this one, counted here, where it arrives, and
    what it is planned to send to all. A server knows of no iterations, and nobody gathers what it would say.
    """
    plan, factors = engine.plan, engine.decision.factors
    book = plan.book
    iterations = 0 if plan.trial else plan.rounds
    traffic, counters = exchange.traffic, exchange.endpoint.counters
    beside = exchange.topology.beside(exchange.rank)
    dense = sent = inside = 0
    by_unit: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("dense", "sent"), 0.0))
    for key, before in list(traffic.dense.items()):
        its_model, version, unit, _, peer = key
        if its_model != model or version != plan.version or not iterations:
            continue
        if peer in beside:
            inside += before
            continue
        after = traffic.sent[key] + HEADER_BYTES * traffic.messages[key]
        dense, sent = dense + before, sent + after
        by_unit[unit]["dense"] += before / iterations
        by_unit[unit]["sent"] += after / iterations
    planned = book.planned_bytes(exchange.rank, factors)
    plan_rows = describe(book, factors, exchange.rank)
    return {
        "schemes": schemes_by_layer(plan_rows),
        "plan": plan_rows,
        "rates": engine.decision.rates,
        "iterations": iterations,
        "bytes_sent_per_iteration": sent / iterations if iterations else 0.0,
        "bytes_dense_per_iteration": dense / iterations if iterations else 0.0,
        "bytes_planned_per_iteration": planned.between,
        "bytes_inside_per_iteration": inside / iterations if iterations else 0.0,
        "bytes_inside_planned_per_iteration": planned.inside,
        "from_servers": [
            _from_server(server, plan, exchange, model) | {"planned": book.planned_bytes(server, factors).between}
            for server in exchange.topology.apart
        ],
        "bytes_source": "counted",
        "traffic": _by_layer(book, by_unit),
        "stall_seconds": engine.stall_seconds / engine.planned_rounds if engine.planned_rounds else 0.0,
        "most_bytes_queued": counters.most_queued,
        "most_bytes_in_flight": counters.most_in_flight,
        "strangers": {"frames": counters.stranger_frames, "connections": counters.stranger_connections},
    }


def _by_layer(book: Book, by_unit: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """By layer and scheme; of what several layers send together, each its share of the values."""
    layers: dict[str, dict[str, dict[str, float]]] = {}
    for index, counted in by_unit.items():
        unit = book.units[index]
        values = sum(book.params[i].numel for i in unit.params) or 1
        for param in (book.params[i] for i in unit.params):
            found = layers.setdefault(param.layer or "(root)", {}).setdefault(unit.scheme, dict.fromkeys(counted, 0.0))
            for what, nbytes in counted.items():
                found[what] += nbytes * param.numel / values
    return layers


def _from_server(server: int, plan: Standing, exchange: Exchange, model: int) -> dict[str, float]:
    """Bytes per iteration: of values (`dense`) and with headers (`sent`)."""
    iterations, traffic = 0 if plan.trial else plan.rounds, exchange.traffic
    book, rank = plan.book, exchange.rank
    units = {unit.index for unit in book.units if _direct(book, unit, server, rank)}
    address = (model, plan.version)
    its = [key for key in list(traffic.received) if key[:2] == address and key[4] == server and key[2] in units]
    dense = sum(traffic.received[key] for key in its)
    sent = dense + HEADER_BYTES * sum(traffic.arrived[key] for key in its)
    return {"dense": dense / iterations, "sent": sent / iterations} if iterations else {"dense": 0.0, "sent": 0.0}


def _direct(book: Book, unit: Unit, server: int, rank: int) -> bool:
    """Has the server itself sent what comes here under its name? By PS it always has; of the rest what another device
    of the node hands on bears the server's name too."""
    return unit.scheme == "ps" or book.speaks_for(unit, server, rank)
