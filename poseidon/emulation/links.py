"""What the links of an emulated network let through, and what the kernel's traffic control is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_network

from poseidon.config.schema import ClusterConfig
from poseidon.config.units import parse_rate, parse_seconds

#: Of a node, to the node; the switch's ends of the links are ``port0`` and so on.
INTERFACE = "eth0"
_FIRST = IPv4Address("10.77.0.0")
_PREFIX = 16
#: TCP's, on the nodes: that of most machines, whatever is this machine's own.
CONGESTION_CONTROL = "cubic"

# What a link that was idle lets through at once, some milliseconds' worth: little, for it is a gift to small models;
# but the kernel hands packets of up to 64 KiB (a network card would cut them) through it as one, and a busy core comes
# late to fill the bucket.
_LEAST_BURST = 80 * 1024
_BURST_SECONDS = 0.002
# What waits in a port of the switch before packets are dropped: much more, and flows through a slow link get uneven.
_LEAST_QUEUE = 128 * 1024
_QUEUE_SECONDS = 0.008
_NETEM_PACKETS = 1_000_000  # enough for any rate: how much waits is the business of other queues


@dataclass(frozen=True)
class Link:
    """Between a node and the switch, full duplex, as the kernel is to make it (dilated already).

    Attributes:
        rate: bits/s each way, Ethernet, IP and TCP headers included; None: as fast as this machine can.
        latency: seconds from this node to any other, beside what the rate costs.
    """

    rate: float | None = None
    latency: float = 0.0


def address(node: int) -> str:
    """Of a node, the same in every run: networks do not see one another."""
    return str(_FIRST + node + 1)


def links(cluster: ClusterConfig, nodes: int) -> list[Link]:
    """Of each node. Time dilation f divides the rates and multiplies the latency."""
    dilation = cluster.time_dilation
    latency = parse_seconds("cluster.latency", cluster.latency) if cluster.latency is not None else 0.0
    rates = [node_rate(cluster, node) for node in range(nodes)]
    return [Link(rate / dilation if rate is not None else None, latency * dilation) for rate in rates]


def node_rate(cluster: ClusterConfig, node: int) -> float | None:
    """Bits/s of a node's link, undilated."""
    if node in cluster.node_bandwidth:
        return parse_rate(f"cluster.node_bandwidth.{node}", cluster.node_bandwidth[node])
    return parse_rate("cluster.bandwidth", cluster.bandwidth) if cluster.bandwidth is not None else None


def shape_node(link: Link) -> list[str]:
    """tc's commands for the node's end: its rate, and the latency on the way out."""
    shaped = shape_port(link, INTERFACE)
    if not link.latency:
        return shaped
    # Below the rate's queue, and at this end only: the switch's queue stays one of bytes.
    parent = "parent 1:1" if shaped else "root"
    delay = f"delay {link.latency * 1e6:.0f}us limit {_NETEM_PACKETS}"
    return [*shaped, f"qdisc add dev {INTERFACE} {parent} handle 10: netem {delay}"]


def shape_port(link: Link, device: str) -> list[str]:
    """tc's commands for one end of a link: its rate on the way out."""
    if link.rate is None:
        return []
    per_second = link.rate / 8
    burst = max(_LEAST_BURST, per_second * _BURST_SECONDS)
    queue = max(_LEAST_QUEUE, per_second * (_QUEUE_SECONDS + 2 * link.latency))
    bucket = f"tbf rate {link.rate:.0f}bit burst {burst:.0f} limit {queue:.0f}"
    return [f"qdisc add dev {device} root handle 1: {bucket}"]


def wiring(pids: Sequence[int]) -> list[str]:
    """ip's commands within the switch's namespace: a bridge, and a link to each node's namespace.

    Args:
        pids: a process in each node's namespace.
    """
    lines = [
        "link set lo up",
        "link add switch type bridge mcast_snooping 0",
        "link set switch addrgenmode none up",  # no IPv6: nothing of the kernel's own on the wires
    ]
    for node, pid in enumerate(pids):
        port = f"port{node}"
        lines += [
            f"link add {port} type veth peer name {INTERFACE} netns {pid}",
            f"link set {port} addrgenmode none master switch up",
        ]
    return lines


def wiring_node(node: int, congestion_control: str | None) -> list[str]:
    """ip's commands within a node's namespace. None: this machine's own congestion control."""
    lines = [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none up",
        f"address add {address(node)}/{_PREFIX} dev {INTERFACE}",
    ]
    if congestion_control is not None:
        network = ip_network(f"{address(node)}/{_PREFIX}", strict=False)
        lines.append(f"route change {network} dev {INTERFACE} src {address(node)} congctl {congestion_control}")
    return lines
