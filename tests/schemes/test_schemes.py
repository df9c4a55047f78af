"""Units of each scheme on several ranks, messages in any order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.planning import FactorSize, Param, Topology, build_book
from poseidon.schemes import Contribution, reconstruct
from poseidon.transport import Header, Kind
from tests.schemes.bus import Bus

ROUNDS = 4
M, N = 6, 5


#: Ranks per node.
NODES = st.one_of(
    st.integers(2, 4).map(lambda nodes: [1] * nodes), st.sampled_from([[2, 2], [3], [2, 1], [1, 3, 2], [2, 2, 2]])
)


def one_unit(devices: list[int], scheme: str, kv_bytes: int, shape: tuple[int, int] = (M, N)):
    param = Param("w", "l", "Linear", shape, "torch.float32", 4, "linear")
    return build_book([param], Topology.of(devices), kv_bytes=kv_bytes, merge_bytes=16, schemes={"w": scheme})


def expected(rows: list[int], grads: list[torch.Tensor | None]) -> torch.Tensor | None:
    parts = [g.double() * (n / sum(rows)) for n, g in zip(rows, grads, strict=True) if n and g is not None]
    return sum(parts[1:], start=parts[0]) if parts else None


@settings(deadline=None, max_examples=60)
@given(
    NODES,
    st.sampled_from([16, 40, 1 << 20]),
    st.integers(0, 10_000),
    st.sampled_from(["all", "some", "none"]),
    st.booleans(),
)
def test_ps(devices, kv_bytes, seed, who, uneven):
    world = sum(devices)
    bus = Bus(one_unit(devices, "ps", kv_bytes), torch.float32, kv_bytes, seed)
    grads: dict[tuple[int, int], torch.Tensor | None] = {}
    rows = {}
    torch.manual_seed(seed)
    for round_ in range(ROUNDS):
        for rank in range(world):
            there = who == "all" or (who == "some" and bus.random.random() < 0.5)
            grads[rank, round_] = torch.randn(M * N) if there else None
            rows[rank, round_] = bus.random.randrange(4) if uneven else 2
    given_ = {key: None if g is None else g.clone() for key, g in grads.items()}
    seen: dict[int, list[torch.Tensor | None]] = {}

    def contribution(rank: int, round_: int) -> Contribution:
        return Contribution(rows[rank, round_], dense=given_[rank, round_])

    def finish(rank: int, round_: int, result: torch.Tensor | None) -> None:
        want = expected([rows[r, round_] for r in range(world)], [grads[r, round_] for r in range(world)])
        if want is None:
            assert result is None
        else:
            torch.testing.assert_close(result, want.float(), rtol=1e-5, atol=1e-6)
            if given_[rank, round_] is not None:
                assert result.data_ptr() == given_[rank, round_].data_ptr()  # in place
        seen.setdefault(round_, []).append(None if result is None else result.clone())

    bus.run(ROUNDS, contribution, finish)
    for results in seen.values():
        assert len(results) == world
        assert all(r is None if results[0] is None else torch.equal(r, results[0]) for r in results)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["sfb", "adam", "block"]),
    st.sampled_from([(M, N), (N, M), (3, 2), (2, 3)]),
    NODES,
    st.sampled_from([12, 40, 1 << 20]),
    st.integers(0, 10_000),
    st.booleans(),
    st.sampled_from([None, 0.0, 0.3, 1.0]),
)
def test_factors(scheme, shape, devices, piece_bytes, seed, uneven, density):
    """Factors, dense gradients and nothing, mixed; one or many pieces; a peer one round ahead; more ranks than rows;
    factors coded or not."""
    world, (m, n) = sum(devices), shape
    unit = one_unit(devices, scheme, 1024, shape)
    bus = Bus(unit, torch.float32, piece_bytes, seed, sparse=density is not None)

    def factor(*shape: int) -> torch.Tensor:
        return torch.randn(shape) if density is None else torch.randn(shape) * (torch.rand(shape) < density)

    torch.manual_seed(seed)
    plan = {}
    for round_ in range(ROUNDS):
        for rank in range(world):
            kind = bus.random.choice(["factors", "factors", "dense", "none"])
            rows = bus.random.randrange(4) if uneven else 3
            plan[rank, round_] = (kind, rows, factor(rows, m), factor(rows, n))
    seen: dict[int, list[torch.Tensor | None]] = {}

    def contribution(rank: int, round_: int) -> Contribution:
        kind, rows, u, v = plan[rank, round_]
        if kind == "factors":
            return Contribution(rows, factors=torch.cat([u.reshape(-1), v.reshape(-1)]), k=rows)
        return Contribution(rows, dense=(u.t() @ v).reshape(-1) if kind == "dense" else None)

    def finish(rank: int, round_: int, result: Any) -> None:
        listed = isinstance(result, list)  # else put together by the devices of a node
        grad = reconstruct(result, torch.Size(shape), torch.float32) if listed else result
        entries = [plan[r, round_] for r in range(world)]
        want = expected([e[1] for e in entries], [None if e[0] == "none" else e[2].t() @ e[3] for e in entries])
        if want is None:
            assert grad is None
        else:
            torch.testing.assert_close(grad, want.float(), rtol=1e-5, atol=1e-5)
        seen.setdefault(round_, []).append(None if grad is None else grad.clone())
        if grad is not None:
            grad.zero_()  # by an optimizer, say: others may not have it yet

    bus.run(ROUNDS, contribution, finish)
    for results in seen.values():
        assert len(results) == world
        assert all(r is None if results[0] is None else torch.equal(r, results[0]) for r in results)


def test_pieces_are_no_larger_than_told():
    bus = Bus(one_unit([1, 1, 1], "sfb", 1024), torch.float32, 12, 0)
    factors = torch.randn(2 * (M + N))
    bus.run(1, lambda rank, round_: Contribution(2, factors=factors.clone(), k=2), lambda *_: None)
    assert {h.kind for *_, h in bus.sent} == {Kind.FACTORS}
    assert max(h.length for *_, h in bus.sent) == 12
    assert sum(h.length for *_, h in bus.sent) == 3 * 2 * 2 * (M + N) * 4


@pytest.mark.parametrize("scheme", ["ps", "sfb", "adam", "block"])
@pytest.mark.parametrize("devices", [[1, 1, 1], [2, 2], [2, 2, 2], [4, 4], [3]])
@pytest.mark.parametrize("shape", [(M, N), (2, 3)])
def test_sent_bytes_are_the_planned_ones(scheme, devices, shape):
    (m, n), book = shape, one_unit(devices, scheme, 40, shape)
    bus = Bus(book, torch.float32, 40, 0)

    def contribution(rank: int, round_: int) -> Contribution:
        if scheme == "ps":
            return Contribution(4, dense=torch.ones(m * n))
        return Contribution(4, factors=torch.ones(4 * (m + n)), k=4)

    bus.run(1, contribution, lambda *_: None)
    for rank in range(sum(devices)):
        beside = book.topology.beside(rank)
        planned = book.planned_bytes(rank, {"w": FactorSize(4 * devices[0], 4)})
        sent = [(peer, h.length) for sender, peer, h in bus.sent if sender == rank]
        assert sum(length for peer, length in sent if peer not in beside) == planned.between
        assert sum(length for peer, length in sent if peer in beside) == planned.inside


@pytest.mark.parametrize("scheme", ["ps", "sfb", "adam", "block"])
def test_devices_of_a_node_send_between_nodes_what_one_would(scheme):
    """Dense gradients once per node, factors of the node's rows (P15, section 3)."""
    factors = {"w": FactorSize(8, 4)}
    sent = [
        sum(book.planned_bytes(rank, factors).between for rank in range(2 * devices))
        for devices in (1, 2, 4)
        for book in [one_unit([devices, devices], scheme, 1024)]
    ]
    if scheme == "adam":  # what a device beside the owner has need not leave the node
        assert sent[0] == sent[1] == sent[2] == 8 * (M + N) * 4 + M * N * 4
    else:
        assert sent == [sent[0]] * 3


@pytest.mark.parametrize("scheme", ["ps", "sfb", "adam", "block"])
def test_waits_for_names_phase_and_rank(scheme):
    bus = Bus(one_unit([1, 1, 1], scheme, 64), torch.float32, 64, 0)
    assert bus.schemes[0].waits_for() == []  # nothing asked yet
    bus.schemes[0].contribute(0, Contribution(1, dense=torch.ones(M * N)))
    missing = bus.schemes[0].waits_for()
    if scheme == "adam":  # rank 0 owns the first layer
        bus.schemes[1].contribute(0, Contribution(1, dense=torch.ones(M * N)))
        assert bus.schemes[1].waits_for() == [("averaged gradient", 0)]
    if scheme in ("sfb", "adam"):
        assert missing == [("factors", 1), ("factors", 2)]
    elif scheme == "block":
        assert missing == [("factors", 1), ("factors", 2), ("block", 1), ("block", 2)]
    else:
        assert {phase for phase, _ in missing} == {"push", "pull"}
        assert {rank for _, rank in missing} == {1, 2}
    for rank in (2,) if scheme == "adam" else (1, 2):
        bus.schemes[rank].contribute(0, Contribution(1, dense=torch.ones(M * N)))
    while any(bus.wires.values()):
        for wire in [w for w, queue in bus.wires.items() if queue]:
            bus.deliver(wire)
    assert len(bus.results[0]) == 1
    # A finished unit that nobody took yet waits for nobody: a peer that leaves now has paid its debts.
    assert bus.schemes[0].waits_for() == []


def test_a_peer_two_rounds_ahead_is_an_error():
    bus = Bus(one_unit([1, 1], "sfb", 64), torch.float32, 64, 0)
    none = Header(Kind.NONE, 1, rows=1)
    bus.schemes[0].on_message(none, memoryview(b""))
    with pytest.raises(RuntimeError, match="rank 1 contributed twice"):
        bus.schemes[0].on_message(none, memoryview(b""))


@pytest.mark.parametrize(("scheme", "kind"), [("ps", Kind.FACTORS), ("sfb", Kind.PUSH), ("block", Kind.PUSH)])
def test_a_message_of_the_other_scheme_is_an_error(scheme, kind):
    bus = Bus(one_unit([1, 1], scheme, 64), torch.float32, 64, 0)
    with pytest.raises(RuntimeError, match="which goes by"):
        bus.schemes[0].on_message(Header(kind, 1, length=4, total=4), memoryview(bytearray(4)))


# --- reconstruct -------------------------------------------------------------------------------------------


def factored(rows: int, u: torch.Tensor, v: torch.Tensor) -> Contribution:
    return Contribution(rows, factors=torch.cat([u.reshape(-1), v.reshape(-1)]), k=u.shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [[4, 4, 4], [4, 3, 7], [0, 3, 7], [1, 0, 0]])
def test_reconstruct_is_the_dense_average(dtype, rows):
    torch.manual_seed(0)
    uv = [(torch.randn(n, M, dtype=dtype), torch.randn(n, N, dtype=dtype)) for n in rows]
    result = reconstruct([factored(n, u, v) for n, (u, v) in zip(rows, uv, strict=True)], torch.Size((M, N)), dtype)
    want = expected(rows, [u.t() @ v for u, v in uv])
    torch.testing.assert_close(result, want.to(dtype))


def test_rows_and_factor_rows_differ():
    """A linear layer on 3-D input: 2 rows (samples), 10 factor rows (positions)."""
    u, v = torch.randn(10, M), torch.randn(10, N)
    other = torch.randn(M, N)
    result = reconstruct(
        [factored(2, u, v), Contribution(6, dense=other.reshape(-1))], torch.Size((M, N)), torch.float32
    )
    torch.testing.assert_close(result, (u.t() @ v) * 0.25 + other * 0.75)


@pytest.mark.parametrize("empty", [0, 1])
def test_factors_without_rows_contribute_nothing(empty):
    u, v = torch.randn(3, M), torch.randn(3, N)
    nan = torch.full((2, M), float("nan")), torch.full((2, N), float("inf"))
    contributions = [factored(3, u, v), factored(3, u, v)]
    contributions[empty] = factored(0, *nan)
    result = reconstruct(contributions, torch.Size((M, N)), torch.float32)
    torch.testing.assert_close(result, u.t() @ v)
    assert reconstruct([factored(0, *nan)] * 2, torch.Size((M, N)), torch.float32) is None


def test_narrow_factors_of_a_wide_weight():
    u, v = torch.randn(4, M).bfloat16(), torch.randn(4, N).bfloat16()
    result = reconstruct([factored(4, u, v)] * 2, torch.Size((M, N)), torch.float32)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, u.float().t() @ v.float(), rtol=2e-2, atol=2e-2)


def test_dense_parts_in_half_precision_are_rounded_once():
    parts = [256.0, 1, 1, 1, 1, 1, 1, 1]
    contributions = [Contribution(1, dense=torch.full((M * N,), p, dtype=torch.bfloat16)) for p in parts]
    result = reconstruct(contributions, torch.Size((M, N)), torch.bfloat16)
    assert torch.equal(result, torch.full((M, N), 263 / 8, dtype=torch.bfloat16))


def test_complex_factors():
    u, v = torch.randn(4, M, dtype=torch.complex64), torch.randn(4, N, dtype=torch.complex64)
    run = partial(reconstruct, [factored(4, u, v)] * 3, torch.Size((M, N)), torch.complex64)
    torch.testing.assert_close(run(), u.t() @ v)
    assert torch.equal(run(), run())
