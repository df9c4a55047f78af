"""``cluster.time_dilation=auto``: how much slower an emulated cluster has to run for this machine to keep up with it.

Software is not dilated: engine, ZeroMQ, gloo, the kernel and the interpreter take the CPU seconds per iteration that
they take, of all nodes together, while an iteration lasts f times as long. f is the least power of two at which that
leaves cores and the engine's busiest thread some rest. Imports torch only where it picks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poseidon.config import to_plain
from poseidon.config.schema import AUTO, ClusterConfig, Comm, TrainConfig
from poseidon.config.units import parse_rate
from poseidon.tracking.facts import cores
from poseidon.tracking.summary import part_name

# Measured on emulated links on two cores of an AMD EPYC that had other work too; a run or two each, so rough.

#: CPU seconds of a node per byte that it sends: sending, the kernel, receiving and adding up as many. comm=ps 1.2e-9
#: (AlexNet, 8 nodes) to 2.2e-9 (VGG19-22K, 2), fsdp 2.1e-9, ddp 0.9e-9 to 1.2e-9; the largest, with a margin.
PER_BYTE = 2.5e-9
#: Of these, what the busiest thread takes: comm=ps 0.6e-9 to 1.15e-9, ddp 0.4e-9 to 0.6e-9.
PER_BYTE_OF_THREAD = 1.2e-9
#: CPU seconds of a node per call of a layer: hooks, messages, sleeping. What 2.2e-9 per byte leave of comm=hybrid's:
#: 0.9e-3 (ResNet-152) to 1.2e-3 (Inception-V3); single 0.4e-3.
PER_LAYER = 1.2e-3
#: The part of the time that cores and thread may be busy.
SHARE = 0.6


@dataclass(frozen=True)
class Demand:
    """What an iteration of one run asks of this machine.

    Attributes:
        label: of the run, for people.
        cpu: seconds of all nodes together.
        thread: CPU seconds of the busiest thread.
        seconds: that the iteration lasts undilated, or less.
    """

    label: str
    cpu: float
    thread: float
    seconds: float

    def factor(self, cores: int) -> float:
        """The least f, a power of two, at which there is time enough."""
        needed = max(self.cpu / cores, self.thread) / (SHARE * self.seconds)
        return 2.0 ** max(0, math.ceil(math.log2(needed))) if needed > 0 else 1.0

    def __str__(self) -> str:
        return f"{self.label}: {self.cpu:.3g} CPU seconds per iteration of {self.seconds:.3g} s"


@dataclass(frozen=True)
class Picked:
    """The factor, and the run that asks for it."""

    factor: float
    because: Demand | None = None

    def __str__(self) -> str:
        why = f" ({self.because}, {cores()} cores)" if self.because else ""
        return f"cluster.time_dilation=auto: f = {self.factor:g}{why}"


def pick(configs: Iterable[TrainConfig]) -> Picked | None:
    """The factor for all runs of a figure: what the most demanding of them needs. None if none says auto.

    Of a sweep too large to know all of its runs, each is taken on the most nodes of any.

    Raises:
        UserError: a model cannot be built, or its hardware does not tell its time.
    """
    asking = [config for config in configs if config.cluster.time_dilation == AUTO]
    if not asking:
        return None
    demands = [demand(config) for config in _distinct(asking)]
    here = cores()
    worst = max((d for d in demands if d), key=lambda d: (d.factor(here), d.cpu / d.seconds), default=None)
    return Picked(worst.factor(here), worst) if worst else Picked(1.0)


def with_factor(config: TrainConfig, factor: float) -> TrainConfig:
    """The config with a number in the place of auto; 1 where it computes for real, which cannot be slowed down."""
    if config.cluster.time_dilation != AUTO:
        return config
    factor = factor if config.hardware is not None else 1.0
    return replace(config, cluster=replace(config.cluster, time_dilation=factor))


def demand(config: TrainConfig) -> Demand | None:
    """Of a run on emulated accelerators; None if it computes for real."""
    if config.hardware is None:
        return None
    from poseidon.training.emulated import undilated
    from poseidon.training.plan import make_plan

    single = config.comm.name is Comm.single
    nodes = 1 if single else config.cluster.nodes
    calls, compute = undilated(config)
    sent = 0.0 if single else make_plan(config).bytes_sent_per_node
    return Demand(
        label=f"{part_name(config.model)}, comm={config.comm.name.value}, {nodes} node{'s' if nodes > 1 else ''}",
        cpu=nodes * (PER_BYTE * sent + PER_LAYER * calls * (1 if single else config.cluster.devices_per_node)),
        thread=PER_BYTE_OF_THREAD * sent,
        seconds=max(compute, 8 * sent / _rate(config.cluster)),
    )


def _rate(cluster: ClusterConfig) -> float:
    """Bits per second of the slowest link, for which all wait."""
    rates = [parse_rate(f"cluster.node_bandwidth.{node}", rate) for node, rate in cluster.node_bandwidth.items()]
    if cluster.bandwidth is not None and len(rates) < cluster.nodes:
        rates.append(parse_rate("cluster.bandwidth", cluster.bandwidth))
    return min(rates, default=math.inf)


def _distinct(configs: Sequence[TrainConfig]) -> list[TrainConfig]:
    """Those that ask for different things, each on the most nodes."""
    most = max(config.cluster.nodes for config in configs)
    found: dict[str, TrainConfig] = {}
    for config in configs:
        config = replace(config, cluster=replace(config.cluster, nodes=most))
        found.setdefault(json.dumps(_relevant(config), sort_keys=True, default=str), config)
    return list(found.values())


def _relevant(config: TrainConfig) -> dict[str, Any]:
    plain = to_plain(config)
    for part in (plain, plain["dataset"]):
        part.pop("seed", None)
    return {key: part for key, part in plain.items() if key != "tracking"}
