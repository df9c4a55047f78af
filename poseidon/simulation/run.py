"""From a job, a network and a system to what an iteration takes."""

from __future__ import annotations

import math
from dataclasses import replace

from poseidon.planning import Rates, Topology, build_book, decide
from poseidon.planning.events import Clock
from poseidon.simulation.engine import EngineSync
from poseidon.simulation.job import Job, Network, System, timing_of
from poseidon.simulation.loop import Loop, Sync
from poseidon.simulation.node import Node
from poseidon.simulation.outcome import Outcome, shared, total, within
from poseidon.simulation.torch_comms import DDPSync, FSDPSync, NoSync

#: Iterations before the steady state, and those of it that are looked at.
_WARMUP, _MEASURED = 3, 3


def simulate(job: Job, network: Network, system: System) -> Outcome:
    """Seconds of an iteration of symmetric nodes, and what they are spent on.

    One node is simulated, for all do the same at the same time; see docs/simulation.md for what that leaves out. The
    alternatives were a simulation of all nodes and messages (32 times as many events, for unequal loads that an even
    deal does not have) and closed formulas (which the order of layers, buckets and copies does not fit into).

    Args:
        network: comm=single takes no notice of its nodes.
    """
    nodes = 1 if system.comm == "single" else network.nodes
    node = Node(Clock(), job, network)
    loop, sync = _system(node, job, replace(network, nodes=nodes), system)
    loop.run(sync)
    node.clock.run()
    assert len(loop.ends) == _WARMUP + _MEASURED, "an iteration waits for something that never comes"
    start, end = loop.ends[_WARMUP - 1], loop.ends[-1]
    busy = {name: within(station.busy, start, end) for name, station in node.stations.items()}
    seconds = {name: total(intervals) / _MEASURED for name, intervals in busy.items()}
    hidden = {name: shared(busy[name], busy["device"]) / _MEASURED for name in busy if name != "device"}
    return Outcome(
        seconds=(end - start) / _MEASURED,
        single=job.seconds,
        nodes=nodes,
        bytes_sent=sum(nbytes for _, nbytes in node.sent) / len(loop.ends),
        busy=seconds,
        waits={name: seconds[name] - hidden[name] for name in hidden},
    )


def _system(node: Node, job: Job, network: Network, system: System) -> tuple[Loop, Sync]:
    iterations, nodes = _WARMUP + _MEASURED, network.nodes
    if system.comm == "single" or (system.comm == "ddp" and nodes == 1):
        loop = Loop(node, job, iterations)
        return loop, NoSync(node, loop, job)
    if system.comm == "ddp":
        loop = Loop(node, job, iterations)
        return loop, DDPSync(node, loop, job, nodes, system)
    if system.comm == "fsdp":
        loop = Loop(node, job, iterations)
        return loop, FSDPSync(node, loop, job, nodes, system.merge_bytes)
    topology = Topology.flat(nodes)
    timing = timing_of(job, network) if system.rule == "time" else None
    decision = decide(
        system.comm,
        job.params,
        [job.factors] * nodes,
        topology,
        timing,
        system.overlap,
        sparse=_sparse(network, system) if nodes > 1 else False,
    )
    book = build_book(
        job.params,
        topology,
        kv_bytes=system.kv_bytes,
        merge_bytes=system.merge_bytes,
        schemes=decision.schemes,
    )
    skips = frozenset(name for name, scheme in decision.schemes.items() if scheme in ("sfb", "block"))
    loop = Loop(node, job, iterations, skips)
    return loop, EngineSync(node, loop, job, book, decision.factors, system.overlap, system.kv_bytes, decision.sparse)


def _sparse(network: Network, system: System) -> Rates | bool:
    """Whether factors are coded: as the engine decides on such a network."""
    if system.sparse != "auto":
        return system.sparse == "always"
    if network.rate is None:
        return False
    return Rates(network.rate * network.goodput / 8, network.hop, math.inf, source="profile")
