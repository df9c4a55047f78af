"""A node that is slow now and then, or always: what ``cluster.straggler`` asks for.

Who is slow in which iteration follows from the seed and the iteration alone, so that all ranks agree without a word, a
rerun is slow where the first run was, and so is a resumed one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from poseidon.config.schema import StragglerConfig, TrainConfig
from poseidon.config.units import parse_seconds
from poseidon.planning import Topology
from poseidon.tracking.summary import slows_nodes


class Straggler:
    """Of one rank: waits where its node is the slow one. At most one node is slow in an iteration.

    Args:
        config: with a delay.
        nodes: that work; ``node``: the rank's own.
        dilation: of the delay (``cluster.time_dilation``).
        sleep: takes the time, seconds; it stands for computing, so nothing can end it early.
    """

    def __init__(
        self,
        config: StragglerConfig,
        *,
        nodes: int,
        node: int,
        seed: int,
        dilation: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert config.delay is not None
        self._seconds = parse_seconds("cluster.straggler.delay", config.delay) * dilation
        self._config, self._nodes, self._node, self._seed, self._sleep = config, nodes, node, seed, sleep

    def slow(self, iteration: int) -> int | None:
        """The node that is slow in this iteration; None: nobody is."""
        draw = random.Random(f"straggler/{self._seed}/{iteration}")
        if draw.random() >= self._config.probability:
            return None
        return draw.randrange(self._nodes) if self._config.node is None else self._config.node

    def wait(self, iteration: int) -> None:
        """Before the forward pass of an iteration."""
        if self.slow(iteration) == self._node:
            self._sleep(self._seconds)


def straggler_of(config: TrainConfig, topology: Topology, rank: int) -> Straggler | None:
    """Of a worker; None if no node is ever slow."""
    node = topology.node_of(rank)
    if not slows_nodes(config) or node is None:
        return None
    cluster = config.cluster
    return Straggler(
        cluster.straggler, nodes=len(topology.nodes), node=node, seed=config.seed, dilation=cluster.time_dilation
    )
