"""Cases that can be done by hand, and what holds for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poseidon.planning import FactorSize, Topology, build_book, decide
from poseidon.planning.events import Clock, Station
from poseidon.simulation import PARTS, Job, Layer, Network, Outcome, System, cells_to_emulate, simulate
from poseidon.simulation.torch_comms import buckets
from tests.simulation.papers import alexnet, param, vgg19_22k

MB = 1_000_000
#: One layer of 1 MB, 8 Mbit/s of payload: a byte takes a microsecond, the layer a second.
ONE = Job((Layer("a", ("a.weight",), 1.0, 2.0),), (param("a.weight", (500, 500)),), step=0.5)
NETWORK = Network(2, 8e6, goodput=1.0, hop=0.01)
WHOLE = {"kv_bytes": 64 * MB, "merge_bytes": 64 * MB}  # one message per layer


def seconds(job: Job, network: Network, system: System) -> float:
    return simulate(job, network, system).seconds


def two(first: int = 1, second: int = 1, **more: float) -> Job:
    """Layers of so many MB."""
    layers = (Layer("a", ("a.weight",), 1.0, 2.0), Layer("b", ("b.weight",), 1.0, 2.0))
    params = tuple(param(f"{name}.weight", (250 * size, 1000)) for name, size in (("a", first), ("b", second)))
    return Job(layers, params, **more)


def test_one_layer_by_hand():
    computing = 1.0 + 2.0 + 0.5
    assert seconds(ONE, NETWORK, System("single")) == pytest.approx(computing)
    # Half of it goes to the other node, and half comes back: two hops.
    for overlap in ("none", "backward", "full"):
        assert seconds(ONE, NETWORK, System("ps", overlap, **WHOLE)) == pytest.approx(computing + 0.5 + 0.5 + 0.02)
    # 2 (P-1)/P round the ring, on four nodes with three hops that do not hide.
    assert seconds(ONE, NETWORK, System("ddp")) == pytest.approx(computing + 1.0 + 0.01)
    assert seconds(ONE, replace(NETWORK, nodes=4), System("ddp")) == pytest.approx(computing + 1.5 + 0.03)
    # Each node steps its half only.
    assert seconds(ONE, NETWORK, System("fsdp")) == pytest.approx(3.25 + 0.5 + 0.5 + 0.02)


def test_factors_by_hand():
    """K = 10 rows of a 1000 x 250 matrix: 50 kB of factors; two others get them, and three are multiplied."""
    job = Job((Layer("a", ("w",), 1.0, 2.0, product=0.8),), (param("w", (1000, 250), True),), {"w": FactorSize(10, 4)})
    three = replace(NETWORK, nodes=3)
    outcome = simulate(job, three, System("hybrid"))
    assert outcome.seconds == pytest.approx(3.0 - 0.8 + 2 * 0.05 + 0.01 + 3 * 0.8)
    assert outcome.bytes_sent == 2 * 50_000
    assert seconds(job, replace(three, nodes=1), System("hybrid")) == pytest.approx(3.0)


def test_two_layers_by_hand():
    whole = {"kv_bytes": 64 * MB, "merge_bytes": 1000}
    job = two(second=6, step=0.5)
    slow = replace(NETWORK, hop=0.0)
    # b is final at 4, and its two pieces are pushed until 7; their answers and a's push take turns until 10.5; a's 11.
    assert seconds(job, slow, System("ps", "backward", **whole)) == pytest.approx(11.5)
    # Nothing leaves before 6: 7 MB, up and down.
    assert seconds(job, slow, System("ps", "none", **whole)) == pytest.approx(6.0 + 7.0 + 0.5)
    # Round and round: b's step, passes and push; a's megabyte, up and down, goes between; b's answer.
    full = simulate(job, slow, System("ps", "full", **whole))
    assert full.seconds == pytest.approx(0.5 * 6 / 7 + 1.0 + 2.0 + 3.0 + 1.0 + 3.0)
    assert (full.limit, full.bound) == ("link", pytest.approx(7.0))


def test_host_by_hand():
    """Copies take 0.5 s each, sums 2 s, on one node one after the other; of two the other's half is added up when it is
    here."""
    job = replace(ONE, step=0.0, host_copy=2.0 * MB, server_sum=0.5 * MB)
    alone = simulate(job, replace(NETWORK, nodes=1), System("ps", **WHOLE))
    assert alone.seconds == pytest.approx(3.0 + 0.5 + 2.0 + 0.5)
    assert alone.busy == pytest.approx({"device": 3.0, "link": 0.0, "copy_out": 0.5, "copy_in": 0.5, "server_sum": 2.0})
    assert (alone.limit, alone.bound) == ("server_sum", 3.0)
    quick = replace(NETWORK, hop=0.0)
    assert seconds(job, quick, System("ps", **WHOLE)) == pytest.approx(3.0 + 0.5 + 1.0 + 1.0 + 0.5 + 0.5)
    # Round a ring sums go on beside the transfer: of half a bucket, 1 s each.
    assert seconds(job, quick, System("ddp")) == pytest.approx(3.0 + 0.5 + 1.0 + 0.5)


def test_the_front_layer_goes_first_only_where_everything_overlaps():
    """The next forward pass need not wait for the last layer's megabytes."""
    job = two(first=1, second=8)
    found = [simulate(job, NETWORK, System("ps", overlap)) for overlap in ("none", "backward", "full")]
    assert found[0].seconds > found[1].seconds > found[2].seconds
    assert len({outcome.bytes_sent for outcome in found}) == 1


@pytest.mark.parametrize("nodes", [2, 3, 8, 32])
@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid"])
def test_bytes_are_those_of_the_plan(comm, nodes):
    """Every node sends the mean of what the book plans for the ranks."""
    job, topology = alexnet(), Topology.flat(nodes)
    decision = decide(comm, job.params, [job.factors] * nodes, topology)
    book = build_book(job.params, topology, kv_bytes=2 << 20, merge_bytes=1 << 16, schemes=decision.schemes)
    planned = sum(book.planned_bytes(rank, decision.factors).between for rank in range(nodes)) / nodes
    for overlap in ("none", "full"):
        sent = simulate(job, Network(nodes, 1e9), System(comm, overlap)).bytes_sent
        assert sent == pytest.approx(planned, rel=1e-9)


@pytest.mark.parametrize("comm", ["ps", "hybrid", "ddp", "fsdp"])
def test_a_faster_link_is_never_slower_and_no_work_gets_lost(comm):
    job = replace(vgg19_22k(), host_copy=10e9, server_sum=1.5e9, step=0.01)
    before = None
    for rate in (1e9, 4e9, 16e9, 64e9, None):
        found = simulate(job, Network(4, rate), System(comm))
        assert found.bound <= found.seconds * (1 + 1e-9)
        assert set(found.busy) == set(PARTS)
        if before is not None:
            assert found.seconds <= before.seconds * (1 + 1e-9)
            assert found.bytes_sent == pytest.approx(before.bytes_sent)
            for part in ("device", "copy_out", "copy_in", "server_sum"):
                assert found.busy[part] == pytest.approx(before.busy[part], rel=1e-6)
        before = found
    assert before is not None
    assert before.busy["link"] == 0


def test_it_is_the_same_every_time():
    job, network, system = vgg19_22k(), Network(8, 10e9), System("hybrid", "full")
    assert simulate(job, network, system) == simulate(job, network, system)


def test_a_weight_of_two_layers_is_final_after_the_first_of_them():
    shared = (Layer("in", ("w",), 1.0, 2.0), Layer("mid", (), 1.0, 2.0), Layer("out", ("w",), 1.0, 2.0))
    job = Job(shared, (param("w", (500, 500)),))
    for comm in ("ps", "ddp", "fsdp"):
        waits = 0.02 if comm != "ddp" else 0.01
        assert seconds(job, NETWORK, System(comm, **WHOLE)) == pytest.approx(9.0 + 1.0 + waits)
    assert seconds(job, NETWORK, System("ps", "full", **WHOLE)) == pytest.approx(9.0 + 1.0 + 0.02)


def test_buckets_are_filled_as_ddp_does():
    params = [param(f"p{i}", (size, 250)) for i, size in enumerate((100, 2000, 300, 300, 2000))]  # x 1 kB
    found = buckets(params, 1 << 20, 2 << 20)
    assert [[p.name for p in bucket] for bucket in found] == [["p4"], ["p3", "p2", "p1"], ["p0"]]


def test_a_station_takes_what_is_most_urgent_and_interrupts_nothing():
    clock = Clock()
    station, order = Station(clock), []
    for name, priority in (("first", 5), ("late", 3), ("urgent", 1), ("later", 3)):
        station.do(1.0, lambda name=name: order.append((name, clock.now)), (priority,))
    clock.run()
    assert order == [("first", 1.0), ("urgent", 2.0), ("late", 3.0), ("later", 4.0)]
    assert station.busy == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]


def outcome(seconds: float, device: float, link: float) -> Outcome:
    return Outcome(seconds, 1.0, 4, 0.0, {"device": device, "link": link}, {"link": seconds - device})


def test_what_limits():
    assert outcome(1.0, 0.99, 0.5).limit == "device"
    assert outcome(2.0, 1.0, 2.0).limit == "link"
    assert replace(outcome(2.0, 1.0, 1.0), waits={"link": 0.05}).limit == "latency"


def test_cells_where_systems_differ_and_where_compute_and_link_are_even_are_chosen():
    cells = {
        (2, 1e9, "ps"): outcome(2.0, 1.0, 2.0),
        (2, 1e9, "ddp"): outcome(1.9, 1.0, 1.9),
        (4, 1e9, "ps"): outcome(4.0, 1.0, 4.0),
        (4, 1e9, "ddp"): outcome(1.5, 1.0, 1.5),
        (4, 4e9, "ps"): outcome(1.2, 1.0, 0.99),
        (4, 4e9, "ddp"): outcome(1.2, 1.0, 0.7),
        (16, 1e9, "ps"): outcome(9.0, 1.0, 9.0),
    }
    found = cells_to_emulate(cells, most=2)
    assert [(choice.nodes, choice.rate) for choice in found] == [(4, 1e9), (4, 4e9)]
    assert "2.67 x" in found[0].why
    assert "within 1%" in found[1].why
