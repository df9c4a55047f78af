"""What coding leaves of factors, and where it is predicted to pay."""

from __future__ import annotations

import pytest

from poseidon.planning import FactorSize, Param, Rates, Topology, build_book, decide
from poseidon.planning.sparse import row_bytes, up_seconds

FC6 = Param("fc6.weight", "fc6", "Linear", (4096, 9216), "torch.float32", 4, "linear")
SIZE = FactorSize(256, 4, u=0.16, v=0.53)


def rates(gbit: float, *, shared: bool = False) -> Rates:
    return Rates(gbit * 1e9 / 8, 1e-4, 5e12, shared=shared, code=1.5e9)


@pytest.mark.parametrize(("u", "v", "itemsize"), [(0.25, 0.5, 4), (0.98, 1.0, 4), (0.25, 0.95, 2), (0.0, 0.0, 8)])
def test_a_factor_is_coded_where_that_is_smaller(u, v, itemsize):
    size, bit = FactorSize(1, itemsize, u, v), 1 / 8
    dense = row_bytes(size, 100, 200, coded=False)
    assert dense == 300 * itemsize
    parts = [min(itemsize, share * itemsize + bit) for share in (u, v)]
    assert row_bytes(size, 100, 200, coded=True) == pytest.approx(100 * parts[0] + 200 * parts[1])


@pytest.mark.parametrize("scheme", ["sfb", "block", "adam"])
@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_slow_links_are_worth_it_and_fast_ones_not(scheme, nodes):
    def coded(gbit: float, *, shared: bool = False) -> bool:
        return up_seconds(FC6, scheme, SIZE, rates(gbit, shared=shared), Topology.flat(nodes))[1]

    assert coded(0.1)
    assert coded(0.1, shared=True)
    assert not coded(100)
    for gbit in (0.5, 1, 2, 5, 10, 20):
        assert coded(gbit) or not coded(gbit, shared=True)  # a shared processor has more to lose
    dense = SIZE._replace(u=1.0, v=1.0)
    assert not up_seconds(FC6, scheme, dense, rates(0.01), Topology.flat(nodes))[1]


def test_what_is_decided_and_planned():
    seen, topology = [{FC6.name: SIZE}, {FC6.name: FactorSize(128, 4, u=0.4, v=0.53)}] * 2, Topology.flat(4)
    for sparse, expected in ((False, []), (True, [FC6.name]), (rates(1), [FC6.name]), (rates(100), [])):
        decision = decide("sfb", [FC6], seen, topology, sparse=sparse)
        assert decision.sparse == expected
        book = build_book([FC6], topology, kv_bytes=1 << 20, merge_bytes=0, schemes=decision.schemes)
        dense = book.planned_bytes(0, decision.factors).between
        assert dense == 3 * 192 * (4096 + 9216) * 4
        share = book.planned_bytes(0, decision.factors, decision.sparse).between / dense
        u, v = 0.24 + 1 / 32, 0.53 + 1 / 32  # weighted by rows
        assert share == pytest.approx((4096 * u + 9216 * v) / 13312 if expected else 1.0)


def test_the_rule_of_time_counts_coding():
    """PS in floats, as K is large; factors where half of them is zero and the link is slow."""
    param = Param("a.weight", "a", "Linear", (4096, 4096), "torch.float32", 4, "linear")
    from poseidon.planning import Timing

    size, topology = FactorSize(600, 4, u=0.1, v=0.1), Topology.flat(8)
    given = Timing(rates(1), {}, {})
    dense = decide("hybrid", [param], [{param.name: size}] * 8, topology, given, sparse=False)
    coded = decide("hybrid", [param], [{param.name: size}] * 8, topology, given, sparse=given.rates)
    assert dense.schemes[param.name] != "sfb"
    assert coded.schemes[param.name] in ("sfb", "block")
    assert coded.sparse == [param.name]
