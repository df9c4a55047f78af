"""Whether an emulated network carries what its config says: measures plain TCP between its nodes and compares.

What is compared is goodput plus the headers that full packets have, with the configured rate: rates are of the link,
and of a full packet's 1514 bytes on it 1448 are payload, so that goodput can be 95.6 % of the rate and no more.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from poseidon.cluster.base import JobResult
from poseidon.cluster.job import launch_job
from poseidon.cluster.screen import print_line
from poseidon.config.schema import ClusterConfig
from poseidon.emulation.goodput import Flow
from poseidon.emulation.links import node_rate

#: Bytes of a full packet on a link of 1500 bytes' MTU / bytes of payload in it (Ethernet 14, IP 20, TCP 32 with the
#: timestamps that Linux sends).
HEADERS = 1514 / 1448
TOLERANCE = 0.05


@dataclass(frozen=True)
class Pattern:
    """Flows that run at the same time, and the links that they are to fill.

    Attributes:
        links: of each such link the flows that go through it, by their place in ``flows``.
        rate: of each such link, bits/s; inf: unshaped.
    """

    name: str
    flows: list[Flow]
    links: list[list[int]]
    rate: float


@dataclass(frozen=True)
class Measured:
    """What a pattern's links carried, undilated.

    Attributes:
        goodput: payload, bits/s, mean over the links.
        lowest: of the link that carried least.
    """

    pattern: Pattern
    goodput: float
    lowest: float

    @property
    def share(self) -> float:
        """Of the rate, headers included."""
        return self.goodput * HEADERS / self.pattern.rate

    @property
    def holds(self) -> bool:
        """An unshaped link promises nothing."""
        return math.isinf(self.pattern.rate) or abs(self.share - 1) <= TOLERANCE


def measure(cluster: ClusterConfig, seconds: float, log_dir: Path) -> tuple[JobResult, list[Measured]]:
    """Runs the patterns one after another, ``seconds`` each; nothing is measured if the job fails.

    Raises:
        UserError: this machine cannot make the network.
    """
    patterns = make_patterns([node_rate(cluster, node) or math.inf for node in range(cluster.nodes)])
    found: list[str] = []

    def on_line(rank: int, stream: str, text: str) -> None:
        if (rank, stream) == (0, "stdout"):
            found.append(text)
        else:
            print_line(rank, stream, text)

    flows = json.dumps([pattern.flows for pattern in patterns])
    argv = [sys.executable, "-m", "poseidon.emulation.goodput", flows, str(seconds)]
    job = launch_job(argv, cluster, cluster.nodes, log_dir, on_line=on_line)
    if not job.ok:
        return job, []
    results: list[list[float]] = json.loads(found[-1])
    dilation = cluster.time_dilation
    return job, [_evaluate(p, [rate * dilation for rate in r]) for p, r in zip(patterns, results, strict=True)]


def make_patterns(rates: Sequence[float]) -> list[Pattern]:
    """What is run on nodes with links of these rates, two nodes at least."""
    nodes = range(len(rates))
    pairs = [(0, 1)] if len(set(rates)) == 1 else [(node, (node + 1) % len(rates)) for node in nodes]
    single = [Pattern(f"1-to-1 ({a} to {b})", [(a, b)], [[0]], min(rates[a], rates[b])) for a, b in pairs]
    everyone = [(a, b) for a in nodes for b in nodes if a != b]
    # Certain to be filled are the slowest nodes' links, both ways: what else is filled, TCP decides.
    slowest = [node for node in nodes if rates[node] == min(rates)]
    links = [[i for i, flow in enumerate(everyone) if flow[end] == node] for node in slowest for end in (0, 1)]
    towards = [(a, 0) for a in nodes[1:]]
    return [
        *single,
        Pattern("all-to-all", everyone, links, min(rates)),
        Pattern("N-to-1 (to 0)", towards, [list(range(len(towards)))], min(rates[0], sum(rates[1:]))),
    ]


def _evaluate(pattern: Pattern, bits: Sequence[float]) -> Measured:
    carried = [sum(bits[i] for i in link) for link in pattern.links]
    return Measured(pattern, fmean(carried), min(carried))
