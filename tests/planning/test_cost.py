"""Every worked number of the papers' cost model."""

from __future__ import annotations

import pytest

from poseidon.planning import FactorSize, Param, Topology, best_scheme, build_book, decide
from poseidon.planning.cost import (
    adam_floats,
    adam_server_floats,
    adam_worker_floats,
    ps_floats,
    ps_server_floats,
    ps_worker_floats,
    sfb_floats,
)


def millions(value: float, digits: int) -> float:
    return round(value / 1e6, digits)


def test_square_layer_of_8_nodes():
    assert millions(ps_worker_floats(4096, 4096), 2) == 33.55
    assert millions(ps_server_floats(4096, 4096, 8, 8), 2) == 33.55
    assert millions(ps_floats(4096, 4096, 8, 8), 2) == 58.72
    assert millions(sfb_floats(4096, 4096, 32, 8), 2) == 3.67
    assert millions(adam_floats(4096, 4096, 32, 8), 1) == 119.3


def test_whole_cluster_of_the_2015_paper():
    m = n = 4096
    k, p = 256, 8
    adam = adam_server_floats(m, n, k, p)
    assert millions(p * ps_worker_floats(m, n), 1) == 268.4
    assert millions(adam, 1) == 151.0
    assert adam == p * adam_worker_floats(m, n, k)
    # Its structure-aware protocol counts what peers send each other once.
    assert millions(min((p - 1) / 2 * sfb_floats(m, n, k, p), adam), 1) == 102.8


@pytest.mark.parametrize(
    ("m", "n", "k", "p", "ps", "sfb", "digits", "choice"),
    [
        (4096, 25088, 32, 8, 359.7, 13.1, 1, "sfb"),
        (4096, 25088, 32, 16, 385.4, 28.0, 1, "sfb"),
        (4096, 25088, 32, 32, 398.2, 57.9, 1, "sfb"),
        (4096, 9216, 256, 8, 132.1, 47.7, 1, "sfb"),
        (4096, 4096, 256, 8, 58.7, 29.4, 1, "sfb"),
        (1000, 4096, 256, 8, 14.3, 18.3, 1, "ps"),
        (1000, 1024, 128, 8, 3.58, 3.63, 2, "ps"),
        (1000, 1024, 32, 32, 3.97, 4.02, 2, "ps"),
        (21841, 4096, 32, 8, 313.1, 11.6, 1, "sfb"),
    ],
)
def test_layers_of_the_papers_networks(m, n, k, p, ps, sfb, digits, choice):
    assert millions(ps_floats(m, n, p, p), digits) == ps
    assert millions(sfb_floats(m, n, k, p), digits) == sfb
    assert best_scheme(m, n, k, p, p) == choice


@pytest.mark.parametrize("p", [8, 16])
def test_googlenet_with_small_batches_goes_by_factors(p):
    assert best_scheme(1000, 1024, 32, p, p) == "sfb"


def test_rows_not_batch_size_decide():
    """A transformer's 4096 x 4096 layer with 8192 tokens per node: factors would cost 16 times as much."""
    assert best_scheme(4096, 4096, 8192, 8, 8) == "ps"
    assert sfb_floats(4096, 4096, 8192, 8) / ps_floats(4096, 4096, 8, 8) == 16


def test_break_even():
    """P* = 2MN / (K(M+N)); equality goes by factors."""
    m = n = 1024
    assert best_scheme(m, n, 128, 8, 8) == "sfb"
    assert best_scheme(m, n, 128, 9, 9) == "ps"


def test_no_rows_go_by_ps_and_no_peers_are_an_equality():
    assert best_scheme(10, 10, 0, 8, 8) == "ps"
    assert best_scheme(10, 10, 1, 1, 1) == "sfb"


def vgg19() -> list[Param]:
    params = []

    def layer(name: str, kind: str, shape: tuple[int, ...]) -> None:
        params.append(
            Param(f"{name}.weight", name, kind, shape, "torch.float32", 4, "linear" if kind == "Linear" else None)
        )
        params.append(Param(f"{name}.bias", name, kind, shape[:1], "torch.float32", 4))

    channels = 3
    for index, width in enumerate([64] * 2 + [128] * 2 + [256] * 4 + [512] * 8):
        layer(f"conv{index}", "Conv2d", (width, channels, 3, 3))
        channels = width
    for index, (m, n) in enumerate([(4096, 25088), (4096, 4096), (1000, 4096)], start=6):
        layer(f"fc{index}", "Linear", (m, n))
    return params


def test_vgg19_bytes_per_node():
    params = vgg19()
    assert sum(p.numel for p in params) == 143_667_240
    seen = [{p.name: FactorSize(32, 4) for p in params if p.factors}] * 8

    def gigabytes(comm: str) -> list[float]:
        decision = decide(comm, params, seen, Topology.flat(len(seen)))
        book = build_book(params, Topology.flat(8), kv_bytes=2 << 20, merge_bytes=64 << 10, schemes=decision.schemes)
        return [2 * book.planned_bytes(rank, decision.factors).between / 1e9 for rank in range(8)]

    assert gigabytes("ps") == pytest.approx([2.01] * 8, abs=0.005)
    assert gigabytes("hybrid") == pytest.approx([0.36] * 8, abs=0.006)
    assert gigabytes("sfb") == pytest.approx([0.36] * 8, abs=0.006)
    assert 4 * adam_floats(4096, 25088, 32, 8) / 1e9 > 2.9


def test_alexnet_needs_more_than_26_gigabits():
    bits = 32 * ps_floats(1, 61_500_000, 8, 8)
    assert bits / 0.25 / 1e9 > 26
