"""The binary header in front of every payload, and its check.

A message is one or two ZeroMQ frames: this header, then raw bytes. The header is checked (magic, version,
checksum, job token, sender, length) before anything else is read; what fails is a stranger's.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"PSDN"
VERSION = 4
TOKEN_BYTES = 16

# magic, version, kind, rank, token | model, plan, round, unit, pair | rows, k, step, dense, offset, total, length
_LAYOUT = struct.Struct("<4sBBH16s HHIII QQQQQQQ")
_MARK = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_CHECKED = _LAYOUT.size + _MARK.size
HEADER_BYTES = _CHECKED + _CRC.size


class Kind(IntEnum):
    """What a message carries."""

    HELLO = 1  # the connection stands
    BYE = 2  # the sender leaves, all it owed has been sent before this
    ABORT = 3  # payload: rank that was lost (2 bytes), then why (UTF-8)
    TEXT = 4  # payload: UTF-8, addressed by (model, unit)
    STATE = 5  # a piece of a tensor of rank 0 that everyone takes over
    PUSH = 6  # worker -> server: a gradient's KV pair
    PUSH_NONE = 7  # worker -> server: no gradient here
    PULL = 8  # server -> worker: the averaged KV pair
    PULL_NONE = 9  # server -> worker: no rank has a gradient
    FACTORS = 10  # worker -> worker: u (k x M), then v (k x N)
    DENSE = 11  # worker -> worker: a whole gradient, where factors do not describe it
    NONE = 12  # worker -> worker: no gradient here
    ASK = 13  # for rank 0's buffers
    BEGIN = 15  # to a rank that is through with its steps: the sender has begun a round
    CHANGED = 16  # from this round on the sender's parameters are others: it goes by this plan no longer
    BLOCK = 17  # worker -> worker of its node: rows of a gradient that it has multiplied out, from row `pair` on
    SETTINGS = 18  # worker -> server: its optimizers' settings from now on, as JSON
    RECEIPT = 19  # the transport's own: all up to `mark` has been taken
    ROWS = 14  # worker -> worker: an embedding's touched rows: values (k x D), then their indices


class Header(NamedTuple):
    """One message's address and size.

    Attributes:
        rank: whose message it is; on nodes with several devices one of them may hand it on.
        model, plan: which distributed model, which version of its plan. round: synchronisation count.
        unit, pair: key within the plan. rows: n_r, the sender's rows in this step. k: rows of the factors.
        step: optimizer steps that the sender had made by then.
        dense: bytes that the whole transfer had before it was coded, which made it smaller; 0: it is as it was.
        offset, total: where this payload stands in the whole transfer, and that one's size (bytes).
        length: bytes of payload that follow.
        mark: not 0: what the receiver is to say in its receipt, and says there; the transport's own.
    """

    kind: Kind
    rank: int
    model: int = 0
    plan: int = 0
    round: int = 0
    unit: int = 0
    pair: int = 0
    rows: int = 0
    k: int = 0
    step: int = 0
    dense: int = 0
    offset: int = 0
    total: int = 0
    length: int = 0
    mark: int = 0

    @property
    def dense_length(self) -> int:
        """Of `length`, the share before it was coded; of all pieces together exactly `dense`."""
        if not self.dense:
            return self.length
        end = self.offset + self.length
        return self.dense * end // self.total - self.dense * self.offset // self.total


def sized(header: Header, length: int) -> Header:
    """`header` with the length of its payload; a transfer of one piece need not say its total."""
    return header._replace(length=length, total=header.total or length)


def pack(header: Header, token: bytes) -> bytes:
    return seal(body(header, token), header.mark)


def body(header: Header, token: bytes) -> bytes:
    """All but the mark, which is known when the message leaves.

    Raises:
        struct.error: a field is out of range.
    """
    return _LAYOUT.pack(MAGIC, VERSION, header.kind, header.rank, token, *header[2:-1])


def seal(body: bytes, mark: int) -> bytes:
    checked = body + _MARK.pack(mark)
    return checked + _CRC.pack(zlib.crc32(checked))


def unpack(data: bytes | memoryview, token: bytes, world_size: int, payload_bytes: int) -> Header | None:
    """The header, or None if these bytes are not a message of this job.

    Args:
        payload_bytes: bytes that arrived behind the header; they must be what it announces.
    """
    if len(data) != HEADER_BYTES:
        return None
    (crc,) = _CRC.unpack_from(data, _CHECKED)
    if zlib.crc32(data[:_CHECKED]) != crc:
        return None
    magic, version, kind, rank, its_token, *rest = _LAYOUT.unpack_from(data)
    if magic != MAGIC or version != VERSION or its_token != token or rank >= world_size:
        return None
    dense, offset, total, length = rest[-4:]
    if length != payload_bytes or offset + length > total or 0 < dense <= total:
        return None
    try:
        return Header(Kind(kind), rank, *rest, *_MARK.unpack_from(data, _LAYOUT.size))
    except ValueError:
        return None
