"""Rows per layer and totals per node, beside the worked numbers of the papers' networks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.planning import FactorSize, Param, Topology, build_book, by_layer, decide, describe, totals
from poseidon.planning.cost import block_floats, ps_floats, sfb_floats
from tests.planning.test_cost import vgg19


def plan(params: list[Param], nodes: int, rows: int, comm: str = "hybrid"):
    seen = [{p.name: FactorSize(rows, 4) for p in params if p.factors}] * nodes
    decision = decide(comm, params, seen, Topology.flat(len(seen)))
    book = build_book(params, Topology.flat(nodes), kv_bytes=2 << 20, merge_bytes=64 << 10, schemes=decision.schemes)
    return by_layer(describe(book, decision.factors, 0))


def test_vgg19_in_gigabytes_per_node():
    rows = plan(vgg19(), 8, 32)
    gigabytes = {way: 4 * floats / 1e9 for way, floats in totals(rows, 8).items()}
    assert gigabytes["ps"] == pytest.approx(2.01, abs=0.005)
    assert gigabytes["chosen"] == gigabytes["sfb"] == pytest.approx(0.36, abs=0.006)
    assert gigabytes["adam"] > 2.9  # the node that owns fc6


def test_a_layer_is_a_row_and_biases_of_linear_layers_share_one():
    rows = plan(vgg19(), 8, 32)
    assert [row.layer for row in rows] == [
        *(f"conv{i}" for i in range(16)),
        "fc6",
        "fc7",
        "fc8",
        "(biases of the layers with K)",
    ]
    assert rows[0].params == ("conv0.weight", "conv0.bias")
    assert rows[0].floats["ps"] == ps_floats(64 * 3 * 9 + 64, 1, 8, 8)
    assert rows[-4].params == ("fc6.weight",)
    assert (rows[-4].shape, rows[-4].rows, rows[-4].scheme) == ((4096, 25088), 32, "sfb")
    assert rows[-1].floats == {"ps": ps_floats(9192, 1, 8, 8), "sfb": None, "rows": None, "adam": None, "block": None}


def test_alexnet_layer_by_layer():
    """P = 8, K = 256: fc6 and fc7 by factors, fc8 not."""
    params = [
        Param(f"fc{i}.weight", f"fc{i}", "Linear", shape, "torch.float32", 4, "linear")
        for i, shape in ((6, (4096, 9216)), (7, (4096, 4096)), (8, (1000, 4096)))
    ]
    rows = plan(params, 8, 256)
    numbers = [(round(row.floats["ps"] / 1e6, 1), round(row.floats["sfb"] / 1e6, 1), row.scheme) for row in rows]
    assert numbers == [(132.1, 47.7, "sfb"), (58.7, 29.4, "sfb"), (14.3, 18.3, "ps")]


def test_a_tensor_of_the_root_module_and_one_node():
    params = [Param("scale", "", "Net", (3,), "torch.float32", 4)]
    (row,) = plan(params, 1, 4)
    assert (row.layer, row.scheme) == ("(root)", "ps")
    assert set(totals([row], 1).values()) == {0.0}


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 512), st.integers(2, 64))
def test_block_never_moves_more_than_both_others(m, n, k, p):
    """Its factors are a part of SFB's, its matrix half of PS's."""
    block = block_floats(m, n, k, p, p)
    assert block == block_floats(n, m, k, p, p)
    assert block <= sfb_floats(m, n, k, p) + ps_floats(m, n, p, p) / 2 + 1e-6 * block
