"""The average against float64, in any order of arrival."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.schemes.average import Average

WIDE = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}
#: One rounding to the result's type, and a few ulp of fp32 before.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.float64: 1e-14,
    torch.complex64: 2e-6,
    torch.complex128: 1e-14,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}


def oracle(rows: list[int], data: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Sum of (n_r / N) g_r in double precision."""
    total = sum(rows)
    parts = [
        g.to(WIDE.get(g.dtype, torch.float64)) * (n / total)
        for n, g in zip(rows, data, strict=True)
        if n and g is not None
    ]
    return sum(parts[1:], start=parts[0]) if parts else None


def average(rows: list[int], data: list[torch.Tensor | None], order, dtype) -> torch.Tensor | None:
    accumulator = Average(5, len(rows), dtype, 2)
    for position, rank in enumerate(order):
        assert rank in accumulator.missing(0)
        assert accumulator.offer(0, rank, rows[rank], data[rank]) == (position == len(rows) - 1)
    total, result = accumulator.take(0)
    assert total == sum(rows)
    return None if result is None else result.clone()


@st.composite
def rounds(draw):
    size = draw(st.integers(1, 5))
    equal = draw(st.booleans())
    count = st.integers(0, 9)
    rows = [draw(count)] * size if equal else [draw(count) for _ in range(size)]
    present = [draw(st.booleans()) or draw(st.booleans()) for _ in range(size)]
    return rows, present, draw(st.permutations(range(size)))


@settings(deadline=None, max_examples=200)
@given(rounds(), st.sampled_from(list(TOLERANCE)), st.integers(0, 1000))
def test_average(round_, dtype, seed):
    rows, present, order = round_
    torch.manual_seed(seed)
    data = [torch.randn(5, dtype=dtype) if there else None for there in present]
    result = average(rows, data, order, dtype)
    in_rank_order = average(rows, data, range(len(rows)), dtype)
    expected = oracle(rows, data)
    if expected is None:
        assert result is None
        assert in_rank_order is None
        return
    assert result is not None
    assert result.dtype == dtype
    assert torch.equal(result, in_rank_order)
    scale = max(float(g.abs().max()) for g in data if g is not None)
    assert (result.to(expected.dtype) - expected).abs().max() <= TOLERANCE[dtype] * max(scale, 1e-3)


def test_every_order_gives_the_same_bits():
    torch.manual_seed(0)
    data = [torch.randn(5) * 10.0**rank for rank in range(4)]
    for rows in ([3, 3, 3, 3], [3, 1, 4, 1], [0, 2, 2, 2]):
        results = [average(rows, data, order, torch.float32) for order in itertools.permutations(range(4))]
        assert all(torch.equal(results[0], r) for r in results)


def test_half_precision_is_rounded_once():
    data = [torch.tensor([256.0] * 5, dtype=torch.bfloat16)] + [torch.ones(5, dtype=torch.bfloat16)] * 7
    # Summed in bf16, 256 + 1 stays 256 seven times.
    result = average([1] * 8, data, range(8), torch.bfloat16)
    assert torch.equal(result, torch.full((5,), 263 / 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_rank_without_rows_contributes_nothing(order, empty):
    """Its loss is a mean over no row: NaN."""
    data = [torch.full((5,), float(rank)) for rank in range(3)]
    data[empty] = torch.full((5,), float("nan"))
    rows = [2, 2, 2]
    rows[empty] = 0
    expected = sum(rank for rank in range(3) if rank != empty) / 2
    assert torch.equal(average(rows, data, order, torch.float32), torch.full((5,), expected))


def test_nobody_has_rows():
    assert average([0, 0], [torch.full((5,), float("nan"))] * 2, (0, 1), torch.float32) is None


def test_twice_is_an_error():
    accumulator = Average(5, 2, torch.float32, 2)
    accumulator.offer(0, 0, 1, None)
    with pytest.raises(RuntimeError, match="part 0 contributed twice"):
        accumulator.offer(0, 0, 1, None)


@pytest.mark.parametrize("depth", [2, 4])
def test_a_result_survives_the_next_rounds(depth):
    accumulator = Average(5, 2, torch.float32, depth)

    def once(value: int) -> torch.Tensor:
        for rank in range(2):
            accumulator.offer(value, rank, 1, torch.full((5,), float(value)))
        return accumulator.take(value)[1]

    results = [once(value) for value in range(depth)]
    assert [result.tolist() for result in results] == [[float(value)] * 5 for value in range(depth)]


def test_rounds_under_way_do_not_mix():
    accumulator = Average(5, 2, torch.float32, 6)
    for value in range(3):
        assert not accumulator.offer(value, 1, 1, torch.full((5,), float(value)))
    for value in range(3):
        assert accumulator.missing(value) == [0]
        assert accumulator.offer(value, 0, 1, torch.full((5,), 2.0))
        assert accumulator.take(value)[1].tolist() == [1 + value / 2] * 5


@pytest.mark.parametrize("rows", [[4, 4], [4, 3], [0, 5], [4, 4, 4], [1, 2, 3], [2, 0, 0]])
def test_written_where_a_contribution_lies_in_blocks(monkeypatch, rows):
    """As the shard's own rank wants it: the same bits, whatever the blocks."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(1000, generator=generator) for _ in rows]
    results = []
    for block in (1 << 20, 64):
        monkeypatch.setattr("poseidon.schemes.average._BLOCK", block)
        accumulator, parts = Average(1000, len(rows), torch.float32, 2), [part.clone() for part in data]
        for part in reversed(range(len(rows))):
            accumulator.offer(0, part, rows[part], parts[part])
        total, result = accumulator.take(0, parts[0])
        assert total == sum(rows)
        assert torch.equal(parts[0], result)
        results.append(result.clone())
    assert torch.equal(*results)
    expected = sum(n / sum(rows) * part.double() for n, part in zip(rows, data, strict=True))
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-6)
