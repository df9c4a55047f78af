"""What holds for every information book, whatever the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.planning import FactorSize, Param, Topology, build_book, decide, describe
from poseidon.planning.book import CLOSE_FACTOR
from poseidon.planning.cost import block_floats

SIZES = {"torch.float32": 4, "torch.float64": 8, "torch.bfloat16": 2, "torch.complex128": 16}


def make(params, world_size: int, **sizes):
    return build_book(params, Topology.flat(world_size), **sizes)


@st.composite
def models(draw) -> list[Param]:
    params = []
    for index in range(draw(st.integers(1, 12))):
        dtype = draw(st.sampled_from(list(SIZES)))
        m, n = draw(st.integers(0, 300)), draw(st.integers(1, 300))
        factors = draw(st.sampled_from(["linear", None]))
        params.append(Param(f"l{index}.weight", f"l{index}", "Linear", (m, n), dtype, SIZES[dtype], factors))
        if draw(st.booleans()):
            params.append(Param(f"l{index}.bias", f"l{index}", "Linear", (m,), dtype, SIZES[dtype]))
    return params


books = st.fixed_dictionaries(
    {"world_size": st.integers(1, 9), "kv_bytes": st.integers(1024, 70_000), "merge_bytes": st.integers(0, 20_000)}
)


@settings(deadline=None, max_examples=150)
@given(models(), books, st.data())
def test_book(params, sizes, data):
    world = sizes["world_size"]
    schemes = {p.name: data.draw(st.sampled_from(["ps", "sfb"])) for p in params if p.factors}
    book = make(params, **sizes, schemes=schemes)
    assert book == make(params, **sizes, schemes=dict(reversed(schemes.items())))

    assert sorted(i for unit in book.units for i in unit.params) == list(range(len(params)))
    largest_pair = 0
    load = [0] * world
    for index, unit in enumerate(book.units):
        assert unit.index == index
        assert all(book.unit_of[i] == index for i in unit.params)
        assert {params[i].dtype for i in unit.params} == {params[unit.params[0]].dtype}
        assert unit.merged == (len(unit.params) > 1)
        flags = len(unit.params) if unit.merged else 0
        assert unit.numel == sum(params[i].numel for i in unit.params) + flags
        assert list(unit.params) == sorted(unit.params, reverse=True)
        if unit.scheme == "sfb":
            assert unit.pairs == ()
            assert [schemes[params[i].name] for i in unit.params] == ["sfb"]
            continue
        assert all(schemes.get(params[i].name) != "sfb" for i in unit.params)
        end = 0
        for number, pair in enumerate(unit.pairs):
            assert (pair.index, pair.offset) == (number, end)
            assert pair.length > 0 or unit.numel == 0
            assert pair.length * unit.itemsize <= sizes["kv_bytes"]
            assert 0 <= pair.server < world
            load[pair.server] += pair.length * unit.itemsize
            largest_pair = max(largest_pair, pair.length * unit.itemsize)
            end += pair.length
        assert end == unit.numel
    assert max(load) - min(load) <= max(largest_pair, max(SIZES.values()))


@settings(deadline=None, max_examples=100)
@given(models(), books, st.data())
def test_bytes_sent_are_bytes_received(params, sizes, data):
    world = sizes["world_size"]
    schemes = {p.name: data.draw(st.sampled_from(["ps", "sfb"])) for p in params if p.factors}
    factors = {name: FactorSize(data.draw(st.integers(0, 64)), 4) for name in schemes}
    book = make(params, **sizes, schemes=schemes)
    sent = sum(book.planned_bytes(rank, factors).between for rank in range(world))
    received = 0
    for unit in book.units:
        if unit.scheme == "sfb":
            name = params[unit.params[0]].name
            received += world * (world - 1) * factors[name].rows * sum(params[unit.params[0]].shape) * 4
        for pair in unit.pairs:
            received += 2 * (world - 1) * pair.length * unit.itemsize  # pushes at the server, pulls at the others
    assert sent == received
    rows = describe(book, factors, 0)
    assert [row["param"] for row in rows] == [p.name for p in params]
    described = sum(row["planned_bytes"] for row in rows)
    empty = sum(
        book.unit_bytes(u, 0, factors).between for u in book.units if not sum(params[i].numel for i in u.params)
    )
    assert described == pytest.approx(book.planned_bytes(0, factors).between - empty)


@pytest.mark.parametrize("scheme", ["sfb", "rows"])
def test_who_only_serves_sends_no_factors(scheme):
    """Beside nodes of several devices, too."""
    params = [Param("a.weight", "a", "Linear", (8, 4), "torch.float32", 4, "linear")]
    book = build_book(params, Topology.of([2, 2], 2), kv_bytes=4096, merge_bytes=0, schemes={"a.weight": scheme})
    assert [book.planned_bytes(rank, {"a.weight": FactorSize(3, 4)}) for rank in (4, 5)] == [(0, 0)] * 2


@settings(deadline=None, max_examples=150)
@given(models(), books)
def test_no_unit_waits_for_a_large_layer(params, sizes):
    """Between the first and the last gradient of a merged unit no large layer has to be computed."""
    large = CLOSE_FACTOR * sizes["merge_bytes"]
    book = make(params, **sizes)
    for unit in book.units:
        first, last = unit.params[0], unit.params[-1]
        for i in range(last, first):
            if params[i].layer != params[first].layer:
                layer_bytes = sum(p.nbytes for p in params if p.layer == params[i].layer)
                assert layer_bytes < large


def test_few_pieces_go_to_the_least_loaded_shards():
    big = Param("big", "big", "X", (1024,), "torch.float32", 4)
    params = [Param(f"p{i}", f"p{i}", "X", (256,), "torch.float32", 4) for i in range(7)]
    book = build_book([*params, big], Topology.flat(3), kv_bytes=1 << 20, merge_bytes=1024)
    load = [sum(p.length for u in book.units for p in u.pairs if p.server == rank) for rank in range(3)]
    assert max(load) - min(load) <= 256


def linear(name: str, m: int, n: int) -> Param:
    return Param(f"{name}.weight", name, "Linear", (m, n), "torch.float32", 4, "linear")


def test_decide():
    big, small = linear("big", 4096, 4096), linear("small", 10, 10)
    conv = Param("conv.weight", "conv", "Conv2d", (64, 64, 3, 3), "torch.float32", 4)
    params = [conv, big, small]
    seen, two = [{p.name: FactorSize(rows, 4) for p in (big, small)} for rows in (32, 31)], Topology.flat(2)
    assert decide("hybrid", params, seen, two).schemes == {
        "big.weight": "sfb",
        "small.weight": "ps",
    }
    assert decide("sfb", params, seen, two).schemes == {"big.weight": "sfb", "small.weight": "sfb"}
    assert decide("ps", params, seen, two).schemes == {"big.weight": "ps", "small.weight": "ps"}
    assert decide("hybrid", params, seen, two).factors["big.weight"] == FactorSize(32, 4)  # 31.5, rounded up


def test_what_is_no_product_on_some_rank_goes_by_ps():
    big = linear("big", 4096, 4096)
    decision = decide("sfb", [big], [{big.name: FactorSize(8, 4)}, {}], Topology.flat(2))
    assert decision.schemes == {}
    assert build_book([big], Topology.flat(2), kv_bytes=1 << 20, merge_bytes=1 << 10).units[0].scheme == "ps"


def test_itemsize_is_the_widest():
    big = linear("big", 64, 64)
    assert decide("sfb", [big], [{big.name: FactorSize(8, 2)}, {big.name: FactorSize(8, 4)}], Topology.flat(2)).factors[
        big.name
    ] == FactorSize(8, 4)


@pytest.mark.parametrize("shape", [(48, 8), (8, 48)], ids=str)
@pytest.mark.parametrize(("servers", "count"), [(None, 4), ([1, 2], 2), (3, 3)], ids=str)
def test_blocks_are_planned_as_the_cost_model_says(shape, servers, count):
    """Each node sends and receives; what it receives is what the others send it."""
    topology, k = Topology.of([1] * 4, servers), 5
    params = [Param("a.weight", "a", "Linear", shape, "torch.float32", 4, "linear")]
    book = build_book(params, topology, kv_bytes=4096, merge_bytes=0, schemes={"a.weight": "block"})
    factors = {"a.weight": FactorSize(k, 4)}
    sent = sum(book.planned_bytes(rank, factors).between for rank in range(4 + len(topology.apart))) / 4
    block = k * (48 / count + 8) + 48 * 8 / count
    assert sent == (4 * count - (0 if topology.apart else count)) * block
    busiest = block_floats(*shape, k, *topology.parties)
    assert busiest == (max(4, count) if topology.apart else 4 + count - 2) * block
    if servers is None:
        assert 2 * sent / 4 == busiest


def test_the_oldest_round_leaves_first_then_the_front_layers():
    params = [Param(f"l{i}.weight", f"l{i}", "Linear", (64, 64), "torch.float32", 4) for i in range(3)]
    book = build_book(params, Topology.flat(2), kv_bytes=1 << 20, merge_bytes=0)
    assert [unit.params for unit in book.units] == [(2,), (1,), (0,)]
    keys = [(round_, unit) for round_ in (0, 1, 7) for unit in (2, 1, 0)]
    assert sorted(keys, key=lambda key: book.priority(*key, front=True)) == keys
    for round_ in (0, 1, 7):
        assert len({book.priority(round_, unit, front=False) for unit in (0, 1, 2)}) == 1
    assert 0 < book.priority(0, 2, front=False) < book.priority(1, 0, front=False) < book.priority(2, 2, front=False)
