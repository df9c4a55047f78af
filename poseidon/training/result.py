"""What all ranks measured, put together at the end of a run."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import nn

from poseidon.training.loop import Outcome

if TYPE_CHECKING:
    from poseidon.api import Session
    from poseidon.planning import Topology


#: Beyond this part of all cores' time this machine was a run's limit.
BUSY = 0.9
#: Beyond this part of an iteration, undilated, the engine's busiest thread would be its limit (design: 0.7).
ENGINE_BUSY = 0.7


def collect(
    session: Session, model: nn.Module, outcome: Outcome, rows: int, *, has_values: bool = True
) -> dict[str, Any]:
    """Collective. The measured part of summary.json, the same on every rank; figures per rank are lists, of bytes per
    node.

    Args:
        rows: global rows of a full step.
        has_values: False: on emulated accelerators replicas have nothing to compare.
    """
    session.synchronize()
    report = session.report(model)
    # Nobody sees how long PyTorch's own reducer waits: null is better than a zero that looks measured.
    counted = session.world_size == 1 or report["bytes_source"] == "counted"
    mine = {
        "digest": session.digest(model) if has_values else None,
        "cpu": outcome.clock.cpu_seconds_per_iteration,
        "thread": outcome.clock.busiest_thread_seconds_per_iteration,
        "stall_seconds": outcome.clock.stall_seconds_per_iteration if counted else None,
        "most": {what: report[f"most_bytes_{what}"] for what in ("queued", "in_flight")} if counted else None,
        "strangers": report["strangers"],
        "busy": session.accelerator.busy(),
        "schemes": _dense_by_scheme(report),
        "from_servers": report["from_servers"],
        "traffic": report["traffic"],
        **{key: report[key] for key in _PER_NODE},
    }
    ranks = session.gather(mine)
    schemes = sorted({scheme for rank in ranks for scheme in rank["schemes"]})
    seconds = outcome.clock.spread
    devices = len(session.topology.nodes[0])
    cpu = _mean([rank["cpu"] for rank in ranks])
    cpu = cpu * devices if cpu is not None else None
    nodes = {key: _by_node(session.topology, [rank[key] for rank in ranks], counted) for key in _PER_NODE}
    threads = [rank["thread"] for rank in ranks]
    score = outcome.score
    return {
        "iterations": outcome.position.iteration,
        "epochs": outcome.position.epoch,
        "images_per_second": rows / seconds["median"] if seconds else None,
        "iteration_seconds": seconds,
        "train_seconds": outcome.position.seconds,
        "seconds_to_target": outcome.seconds_to_target,
        "stall_seconds": _mean([rank["stall_seconds"] for rank in ranks]),
        "stall_seconds_per_rank": [rank["stall_seconds"] for rank in ranks],
        "cpu_seconds_per_iteration": cpu,
        "cpu_seconds_per_iteration_per_rank": [rank["cpu"] for rank in ranks],
        "busiest_thread_seconds_per_iteration": threads,
        "cpu_busy_share": outcome.clock.load.busy_share,
        "emulated_busy_seconds": _busiest([rank["busy"] for rank in ranks], outcome.position.iteration),
        **limits(
            seconds["median"] if seconds else None,
            cpu,
            max((thread for thread in threads if thread is not None), default=None),
            max(nodes["bytes_sent_per_iteration"]),
            outcome.clock.load.busy_share,
        ),
        **nodes,
        **_of_servers([rank["from_servers"] for rank in ranks]),
        "bytes_by_scheme": {
            s: max(_by_node(session.topology, [rank["schemes"].get(s, 0.0) for rank in ranks], counted))
            for s in schemes
        },
        "bytes_by_layer": _by_layer(session.topology, [rank["traffic"] for rank in ranks]),
        "bytes_source": report["bytes_source"],
        "schemes": report["schemes"],
        "rates": report["rates"],
        "train_loss": outcome.train_loss,
        "eval_accuracy": score.accuracy if score else None,
        "eval_loss": score.loss if score else None,
        "replica_digests": [rank["digest"] for rank in ranks],
        **{
            f"most_bytes_{what}": max(rank["most"][what] for rank in ranks) if counted else None
            for what in ("queued", "in_flight")
        },
        # Each rank has sockets of its own that strangers may find.
        "strangers": {what: sum(rank["strangers"][what] for rank in ranks) for what in report["strangers"]},
    }


def limits(
    seconds: float | None, cpu: float | None, thread: float | None, sent: float, busy: float | None
) -> dict[str, Any]:
    """Was software the limit? Its CPU time is not dilated, so it is held against undilated iterations.

    Args:
        seconds: of an iteration, undilated.
        cpu: CPU seconds per iteration of one node.
        thread: CPU seconds per iteration of the busiest engine thread of any node.
        sent: bytes per iteration that a node sends.
        busy: part of this machine's time that was not idle.
    """
    known = bool(seconds) and thread is not None
    return {
        "cpu_bound": None if busy is None else busy > BUSY,
        "engine_bound": thread > ENGINE_BUSY * seconds if known else None,  # type: ignore[operator]
        "engine_limit_bits_per_second": 8 * sent / thread if thread and sent else None,
        "cores_per_node": cpu / seconds if seconds and cpu is not None else None,
    }


def _busiest(nodes: list[dict[str, float]], iterations: int) -> dict[str, float] | None:
    """Per iteration, of each emulated part where it has most to do; None without any."""
    if not nodes[0] or not iterations:
        return None
    return {part: max(node[part] for node in nodes) / iterations for part in nodes[0]}


_PER_NODE = (
    "bytes_sent_per_iteration",
    "bytes_dense_per_iteration",
    "bytes_planned_per_iteration",
    "bytes_inside_per_iteration",
    "bytes_inside_planned_per_iteration",
)


def _of_servers(ranks: list[list[dict[str, float]]]) -> dict[str, list[float] | None]:
    """Of each node that only serves: what all ranks have had from it, and what was planned; null if there is none."""
    servers = list(zip(*ranks, strict=True))
    found = {what: [sum(rank[what] for rank in server) for server in servers] for what in ("sent", "dense")}
    found["planned"] = [server[0]["planned"] for server in servers]
    return {f"server_bytes_{what}_per_iteration": values or None for what, values in found.items()}


def _by_node(topology: Topology, values: list[float], counted: bool) -> list[float]:
    """Of a node what its ranks send together; of PyTorch's rings, through nodes one after the other, what one sends."""
    if counted:
        return [sum(values[rank] for rank in node) for node in topology.nodes]
    return [values[node[-1]] if len(topology.nodes) > 1 else 0.0 for node in topology.nodes]


def _dense_by_scheme(report: dict[str, Any]) -> dict[str, float]:
    """A rank's ``bytes_dense_per_iteration``, split; {} if it sends nothing."""
    dense = report["bytes_dense_per_iteration"]
    if report["bytes_source"] == "computed":
        return dict.fromkeys(report["schemes"].values(), dense) if dense else {}
    found: dict[str, float] = defaultdict(float)
    for by_scheme in report["traffic"].values():
        for scheme, counted in by_scheme.items():
            found[scheme] += counted["dense"]
    return {scheme: nbytes for scheme, nbytes in found.items() if nbytes}


def _by_layer(topology: Topology, ranks: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """By layer and scheme what the node sends that sends most of it."""
    found: dict[str, Any] = {}
    for layer, schemes in ranks[0].items():
        for scheme, counted in schemes.items():
            found.setdefault(layer, {})[scheme] = {
                what: max(_by_node(topology, [_of(rank, layer, scheme, what) for rank in ranks], True))
                for what in counted
            }
    return found


def _of(rank: dict[str, dict[str, dict[str, float]]], layer: str, scheme: str, what: str) -> float:
    return rank.get(layer, {}).get(scheme, {}).get(what, 0.0)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
