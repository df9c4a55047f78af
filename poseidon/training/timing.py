"""What comm.rule=time goes by where accelerators and links are emulated: the profile's figures, undilated."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.config.schema import ClusterConfig, TrainConfig
from poseidon.config.units import parse_rate, parse_seconds
from poseidon.emulation.accelerator import product_seconds
from poseidon.emulation.layers import LayerTime
from poseidon.planning import Rates, Timing

#: Of a packet, what is not headers; and seconds of a hop beside the link's latency: of the software at both ends.
_GOODPUT, _HOP = 0.957, 1e-4


def timing_of(config: TrainConfig, calls: Sequence[LayerTime]) -> Timing | None:
    """Of the config's emulated cluster; None if its links are as fast as this machine's, and nobody knows how fast that
    is."""
    link = _link(config.cluster)
    if config.hardware is None or link is None:
        return None
    linear = [call for call in calls if call.rows]
    flops, seconds = sum(call.forward_flops for call in linear), sum(map(product_seconds, linear))
    latency = config.cluster.latency
    rates = Rates(
        link=link,
        hop=_HOP + (parse_seconds("cluster.latency", latency) if latency is not None else 0.0),
        multiply=flops / seconds if seconds else float("inf"),
        add=config.hardware.server_sum,
        copy=config.hardware.host_copy,
        source="profile",
    )
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for call in calls:
        if call.params:
            name = call.params[0]
            forward[name] = forward.get(name, 0.0) + call.forward
            backward[name] = backward.get(name, 0.0) + call.backward
    return Timing(rates, backward, forward)


def _link(cluster: ClusterConfig) -> float | None:
    """Bytes/s of the slowest node, if all are said."""
    slowest = [parse_rate(f"cluster.node_bandwidth.{node}", rate) for node, rate in cluster.node_bandwidth.items()]
    if cluster.bandwidth is not None:
        slowest.append(parse_rate("cluster.bandwidth", cluster.bandwidth))
    return _GOODPUT * min(slowest) / 8 if slowest else None
