"""Global batches: every row once per epoch, by seed and epoch only, cut by rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.config.shares import cut
from poseidon.data.sampler import GlobalBatchSampler
from poseidon.errors import UserError

sizes = st.integers(1, 200)
ranks = st.integers(1, 9)
batches = st.integers(1, 40)


def ranks_of(size, batch, world, **options):
    return [GlobalBatchSampler(size, batch, rank=r, world_size=world, **options) for r in range(world)]


@given(size=sizes, batch=batches, world=ranks, epoch=st.integers(0, 5))
def test_all_ranks_make_the_same_steps_and_cover_the_epoch_once(size, batch, world, epoch):
    samplers = ranks_of(size, batch, world)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    steps = [list(sampler) for sampler in samplers]
    assert {len(own) for own in steps} == {len(samplers[0])}
    assert sorted(row for own in steps for indices in own for row in indices) == list(range(size))
    assert all(len(indices) <= batch for own in steps for indices in own)


@given(size=sizes, batch=batches, world=ranks, seed=st.integers(-5, 5))
def test_one_process_with_the_global_batch_sees_the_same_global_batches(size, batch, world, seed):
    single = list(GlobalBatchSampler(size, batch * world, seed=seed))
    split = zip(*(list(sampler) for sampler in ranks_of(size, batch, world, seed=seed)), strict=True)
    assert single == [[row for part in parts for row in part] for parts in split]


@given(rows=st.integers(0, 100), parts=ranks)
def test_shares_are_even_and_the_first_has_rows_if_any_has(rows, parts):
    shares = [cut(rows, part, [1] * parts) for part in range(parts)]
    assert [row for part in shares for row in part] == list(range(rows))
    lengths = [len(part) for part in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths)


@given(rows=st.integers(0, 100), shares=st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_pieces_are_as_large_as_their_shares_within_a_row(rows, shares):
    pieces = [cut(rows, part, shares) for part in range(len(shares))]
    assert [row for piece in pieces for row in piece] == list(range(rows))
    for piece, share in zip(pieces, shares, strict=True):
        assert abs(len(piece) - rows * share / sum(shares)) < 1 + 1e-9
    assert not rows or pieces[0]


def test_ranks_with_unequal_shares_see_one_process_s_global_batches():
    single = list(GlobalBatchSampler(103, 12, seed=3))
    own = [list(sampler) for sampler in ranks_of(103, 4, 3, seed=3, shares=[1, 3, 2])]
    assert [len(rows[0]) for rows in own] == [2, 6, 4]
    assert single == [[row for part in parts for row in part] for parts in zip(*own, strict=True)]


def test_devices_divide_their_nodes_rows():
    single = list(GlobalBatchSampler(103, 12, seed=3))
    own = [list(sampler) for sampler in ranks_of(103, 6, 4, seed=3, shares=[1, 3], devices=2)]
    assert [len(rows[0]) for rows in own] == [2, 1, 5, 4]
    assert single == [[row for part in parts for row in part] for parts in zip(*own, strict=True)]


def test_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        sampler = GlobalBatchSampler(100, 10, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 1) != order(1, 0)


@given(size=sizes, batch=batches, world=ranks, done=st.integers(0, 10))
def test_an_epoch_can_go_on_from_where_it_was_left(size, batch, world, done):
    whole = ranks_of(size, batch, world)
    rest = ranks_of(size, batch, world)
    for sampler in rest:
        sampler.set_epoch(0, start_row=min(done * batch * world, size))
    assert [list(sampler)[done:] for sampler in whole] == [list(sampler) for sampler in rest]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0, 1), "no rows"), ((5, 0), "batch_size"), ((5, 1, 2, 2), "rank is 2"), ((5, 1, 0, 4, 3), "devices is 3")],
)
def test_bad_arguments_are_named(arguments, words):
    size, batch, *place = arguments
    with pytest.raises(UserError, match=words):
        GlobalBatchSampler(size, batch, **dict(zip(("rank", "world_size", "devices"), place, strict=False)))
