"""Sparse factors come out of their coding as they went in, bit for bit; what is no coding is refused by name."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.schemes.coding import _CHUNK, bitmap_bytes, decode, encode, joined
from poseidon.schemes.memory import raw

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
ODD = [math.nan, -math.nan, math.inf, -math.inf, 5e-324, 1e-45, -1e-40, -0.0]


def matrix(numel: int, density: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    odd = torch.tensor(ODD, dtype=torch.float64)
    some = torch.rand(numel, generator=generator) < 0.1
    values[some] = odd[torch.randint(len(ODD), (int(some.sum()),), generator=generator)]
    values[torch.rand(numel, generator=generator) >= density] = 0.0
    return values.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and bytes(raw(one)) == bytes(raw(other))


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(DTYPES),
    st.lists(
        st.tuples(
            st.integers(0, 300) | st.sampled_from([_CHUNK - 1, _CHUNK, 2 * _CHUNK + 9]),
            st.sampled_from([0.0, 0.02, 0.4, 0.9, 1.0]),
        ),
        min_size=2,
        max_size=2,
    ),
    st.integers(0, 1000),
    st.integers(0, 3),
)
def test_any_bits_come_back(dtype, sizes, seed, shift):
    """Also from memory that is aligned to nothing, as a socket's."""
    parts = [matrix(numel, density, seed + i, dtype) for i, (numel, density) in enumerate(sizes)]
    coded = [encode(part) for part in parts]
    for part, (bits, words) in zip(parts, coded, strict=True):
        non_zero = int(np.count_nonzero(words))
        if len(bits):
            assert len(bits) == bitmap_bytes(part.nbytes // words.itemsize)
            assert (non_zero, len(bits) + words.nbytes < part.nbytes) == (len(words), True)
        else:
            assert bitmap_bytes(len(words)) + non_zero * words.itemsize >= part.nbytes == words.nbytes
    data = torch.empty(shift + joined(coded).numel(), dtype=torch.uint8)[shift:]
    data.copy_(joined(coded))
    found = decode(data, [part.numel() for part in parts], [len(bits) > 0 for bits, _ in coded], dtype)
    assert same(found, torch.cat(parts))


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=120), st.lists(st.tuples(st.integers(0, 200), st.booleans()), min_size=1, max_size=2))
def test_noise_is_decoded_or_refused(noise, parts):
    numels, sparse = [numel for numel, _ in parts], [its for _, its in parts]
    data = torch.frombuffer(bytearray(noise), dtype=torch.uint8) if noise else torch.empty(0, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        assert decode(data, numels, sparse, torch.float32).numel() == sum(numels)


@pytest.mark.parametrize("change", ["shorter", "longer", "bit more", "bit less"])
def test_what_was_changed_on_its_way_is_refused(change):
    given_ = matrix(1000, 0.3, 0, torch.float32)
    data = joined([encode(given_)])
    if change == "shorter":
        data = data[:-4]
    elif change == "longer":
        data = torch.cat([data, data[:4]])
    else:
        wanted = 0 if change == "bit more" else 1
        place = next(i for i in range(1000) if int(data[i // 8]) >> i % 8 & 1 == wanted)
        data[place // 8] ^= 1 << place % 8
    with pytest.raises(RuntimeError, match="the bitmaps of coded factors mark"):
        decode(data, [1000], [True], torch.float32)


def test_flushing_small_numbers_does_not_change_what_is_sent():
    small = torch.full((100,), 1e-45)
    small[10:] = 0.0
    torch.set_flush_denormal(True)
    try:
        coded = encode(small)
        found = decode(joined([coded]), [100], [True], torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert same(found, small)
