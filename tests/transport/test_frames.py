from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.transport.frames import HEADER_BYTES, Header, Kind, pack, sized, unpack

TOKEN = bytes(range(16))
WORLD = 5


def number(bits: int):
    return st.integers(0, 2**bits - 1)


@st.composite
def headers(draw) -> Header:
    length, offset = draw(number(40)), draw(number(40))
    total = offset + length + draw(number(40))
    return Header(
        draw(st.sampled_from(list(Kind))),
        draw(st.integers(0, WORLD - 1)),
        draw(number(16)),
        draw(number(16)),
        draw(number(32)),
        draw(number(32)),
        draw(number(32)),
        draw(number(64)),
        draw(number(64)),
        draw(number(64)),
        draw(st.just(0) | st.integers(total + 1, 2**60)),
        offset,
        total,
        length,
        draw(number(64)),
    )


@settings(deadline=None)
@given(headers())
def test_round_trip(header):
    data = pack(header, TOKEN)
    assert len(data) == HEADER_BYTES
    assert unpack(data, TOKEN, WORLD, header.length) == header
    assert unpack(memoryview(data), TOKEN, WORLD, header.length) == header


@settings(deadline=None, max_examples=10)
@given(headers())
def test_every_bit_counts(header):
    data = pack(header, TOKEN)
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack(flipped, TOKEN, WORLD, header.length) is None
    for end in range(HEADER_BYTES):
        assert unpack(data[:end], TOKEN, WORLD, header.length) is None
    assert unpack(data + b"\0", TOKEN, WORLD, header.length) is None


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_header(data):
    assert unpack(data, TOKEN, WORLD, 0) is None


def test_what_does_not_fit_is_refused():
    header = Header(Kind.PUSH, 1, offset=8, total=16, length=8)
    data = pack(header, TOKEN)
    assert unpack(data, TOKEN, WORLD, 8) == header
    assert unpack(data, TOKEN, WORLD, 7) is None  # payload cut short
    assert unpack(data, bytes(16), WORLD, 8) is None  # another job's token
    assert unpack(data, b"", WORLD, 8) is None
    assert unpack(data, TOKEN, 1, 8) is None  # a rank that does not exist
    assert unpack(pack(header._replace(total=15), TOKEN), TOKEN, WORLD, 8) is None  # beyond the transfer's end
    assert unpack(pack(header._replace(kind=99), TOKEN), TOKEN, WORLD, 8) is None


def test_what_was_coded_is_smaller_than_it_was():
    header = Header(Kind.FACTORS, 1, dense=100, total=99, length=8)
    assert unpack(pack(header, TOKEN), TOKEN, WORLD, 8) == header
    for dense in (99, 1):
        assert unpack(pack(header._replace(dense=dense), TOKEN), TOKEN, WORLD, 8) is None


@given(st.integers(1, 200), st.integers(1, 10**12), st.integers(1, 50))
def test_pieces_of_what_was_coded_make_up_what_it_was(total, more, piece):
    header, dense = Header(Kind.FACTORS, 0), total + more
    pieces = [(start, min(piece, total - start)) for start in range(0, total, piece)]
    parts = [header._replace(dense=dense, total=total, offset=start, length=size) for start, size in pieces]
    assert sum(part.dense_length for part in parts) == dense
    assert all(part._replace(dense=0).dense_length == part.length for part in parts)


def test_sized():
    header = Header(Kind.PUSH, 0)
    assert sized(header, 8) == header._replace(length=8, total=8)
    assert sized(header._replace(total=20), 8) == header._replace(length=8, total=20)
