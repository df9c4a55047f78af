"""What the kernel is told, without telling it."""

from __future__ import annotations

import re

import pytest

from poseidon.config.schema import ClusterConfig, ClusterKind
from poseidon.emulation.links import Link, address, links, node_rate, shape_node, shape_port, wiring, wiring_node


def cluster(**values):
    return ClusterConfig(ClusterKind.emulated, **values)


def number(command, name):
    return float(re.search(rf"\b{name} ([\d.]+)", command)[1])


@pytest.mark.parametrize(
    ("node", "text"),
    [(0, "10.77.0.1"), (1, "10.77.0.2"), (254, "10.77.0.255"), (255, "10.77.1.0"), (999, "10.77.3.232")],
)
def test_addresses_follow_from_the_node(node, text):
    assert address(node) == text


def test_single_nodes_may_have_other_links():
    config = cluster(nodes=3, bandwidth="1gbit", node_bandwidth={1: "100mbit"})
    assert [node_rate(config, node) for node in range(3)] == [1e9, 1e8, 1e9]
    assert links(config, 3) == [Link(1e9), Link(1e8), Link(1e9)]


def test_a_link_may_be_unshaped():
    config = cluster(node_bandwidth={0: "1mbit"})
    assert links(config, 2) == [Link(1e6), Link(None)]
    assert shape_port(Link(None), "port1") == shape_node(Link(None)) == []


def test_dilation_divides_rates_and_multiplies_latencies():
    found = links(cluster(bandwidth="10gbit", node_bandwidth={1: "1gbit"}, latency="50us", time_dilation=20.0), 2)
    assert [link.rate for link in found] == [5e8, 5e7]
    assert [link.latency for link in found] == [pytest.approx(1e-3)] * 2


@pytest.mark.parametrize("rate", [1e5, 1e8, 1e9, 1e10, 1e11])
def test_a_shaped_end_lets_packets_through_whole_and_queues_some_milliseconds_worth(rate):
    (command,) = shape_port(Link(rate), "port3")
    assert command.startswith("qdisc add dev port3 root handle 1: tbf ")
    assert number(command, "rate") == rate
    assert number(command, "burst") >= 65536 * 1514 / 1448
    assert number(command, "burst") <= max(80 * 1024, 0.002 * rate / 8)  # what an idle link lets through at once
    assert number(command, "limit") >= max(128 * 1024, 0.008 * rate / 8)


def test_latency_is_added_once_on_the_way_out_of_a_node():
    bucket, delay = shape_node(Link(1e9, 1e-4))
    assert [bucket] == [line.replace("port0", "eth0") for line in shape_port(Link(1e9, 1e-4), "port0")]
    assert delay.startswith("qdisc add dev eth0 parent 1:1 handle 10: netem delay 100us ")
    (delay,) = shape_node(Link(None, 1e-4))
    assert delay.startswith("qdisc add dev eth0 root handle 10: netem delay 100us ")


def test_a_switch_has_a_port_per_node():
    lines = wiring([4711, 4712])
    assert [line for line in lines if "netns" in line] == [
        "link add port0 type veth peer name eth0 netns 4711",
        "link add port1 type veth peer name eth0 netns 4712",
    ]


def test_a_node_has_a_loopback_an_address_and_its_congestion_control():
    assert wiring_node(1, "cubic") == [
        "link set lo up",
        "link set eth0 addrgenmode none up",
        "address add 10.77.0.2/16 dev eth0",
        "route change 10.77.0.0/16 dev eth0 src 10.77.0.2 congctl cubic",
    ]
    assert wiring_node(1, None) == wiring_node(1, "cubic")[:3]
