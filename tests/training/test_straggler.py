"""Who is slow, when, and for how long; all but one test without waiting for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from poseidon.config.compose import compose
from poseidon.config.schema import Comm, StragglerConfig
from poseidon.planning import Topology
from poseidon.tracking.summary import emulated_costs
from poseidon.training.loop import Trainer
from poseidon.training.straggler import Straggler, straggler_of

from .conftest import make_config
from .fakes import World

ON = ["cluster=emulated", "cluster.straggler.delay=100ms"]
#: Two nodes of two devices.
TOPOLOGY = Topology.of([2, 2])


def made(node: int = 0, seed: int = 0, config: dict[str, Any] | None = None, **more: Any) -> Straggler:
    """Of one of four nodes."""
    return Straggler(StragglerConfig("100ms", **(config or {})), nodes=4, node=node, seed=seed, **more)


def waits(iterations: int, **more: Any) -> list[float]:
    """Of one node, in so many iterations."""
    found: list[float] = []
    one = made(sleep=found.append, **more)
    for iteration in range(iterations):
        one.wait(iteration)
    return found


def test_in_each_iteration_one_node_waits_and_each_does_as_often_as_the_others() -> None:
    per_node = [waits(400, node=node) for node in range(4)]
    assert sum(map(len, per_node)) == 400
    assert all(70 < len(found) < 130 for found in per_node)
    assert set(per_node[0]) == {0.1}


def test_the_share_of_slow_iterations() -> None:
    slow = Counter(made(config={"probability": 0.25}).slow(iteration) for iteration in range(1000))
    assert 700 < slow.pop(None) < 800
    assert set(slow) == {0, 1, 2, 3}


def test_always_the_same_node() -> None:
    config = {"node": 2}
    assert [len(waits(9, node=node, config=config)) for node in range(4)] == [0, 0, 9, 0]
    assert {made(config={"node": 2, "probability": 0.5}).slow(i) for i in range(99)} == {2, None}


def test_the_seed_decides() -> None:
    first, again, other = ([made(seed=seed).slow(i) for i in range(50)] for seed in (0, 0, 1))
    assert first == again != other


def test_the_delay_is_dilated() -> None:
    assert set(waits(40, dilation=8.0)) == {0.8}


def test_all_devices_of_a_node_are_slow_together() -> None:
    config = compose("train", [*ON, "cluster.devices_per_node=2", "cluster.straggler.node=1"])
    made = [straggler_of(config, TOPOLOGY, rank) for rank in range(4)]
    assert [one is not None and one.slow(0) == TOPOLOGY.node_of(rank) for rank, one in enumerate(made)] == [
        *(False, False),
        *(True, True),
    ]


@pytest.mark.parametrize("overrides", [["cluster=emulated"], [*ON, "comm=single"], []])
def test_nobody_is_slow_unless_asked_for_nor_one_process_alone(overrides: list[str]) -> None:
    config = compose("train", overrides)
    assert straggler_of(config, TOPOLOGY, 0) is None
    assert "straggler" not in emulated_costs(config)


def test_it_is_told_among_what_is_emulated() -> None:
    assert emulated_costs(compose("train", ON)) == ["network", "straggler"]


def test_a_training_takes_the_delay_as_a_nodes_computing(make_parts: Callable[..., Any]) -> None:
    config = make_config(Comm.ps, epochs=None, iterations=4, eval_every=0)
    config.cluster.straggler = StragglerConfig("40ms", node=1)
    for outcome in World(2).run(lambda session: Trainer(session, make_parts(), config).run()):
        assert min(outcome.clock.seconds) > 0.038  # of both nodes: one waits for the other
    config.cluster.straggler = StragglerConfig("40ms", node=1, probability=1e-9)
    (outcome, _) = World(2).run(lambda session: Trainer(session, make_parts(), config).run())
    assert min(outcome.clock.seconds) < 0.038
