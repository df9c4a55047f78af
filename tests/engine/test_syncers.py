"""What a rank knows of the others' rows, when one of them is a round ahead."""

from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from poseidon.engine import syncers as module
from poseidon.engine.device import Host
from poseidon.schemes import Contribution
from poseidon.transport import Header, Kind


def test_rows_are_those_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_scheme", MagicMock())
    exchange, book = MagicMock(rank=0, world_size=2), MagicMock()
    book.units = [MagicMock(params=[0])]
    syncers = module.Syncers(cast(Any, exchange), 0, 1, book, [cast(Any, None)], 0, 2, Host())

    def hear(round_: int, rows: int) -> None:
        syncers.on_message(Header(Kind.PUSH, rank=1, round=round_, rows=rows), memoryview(b""))

    hear(0, 16)
    syncers.contribute(0, 0, 0, Contribution(16))
    hear(1, 7)  # rank 1 has all results of round 0
    assert syncers.rows_of(0) == {0: 16, 1: 16}
    syncers.contribute(1, 1, 0, Contribution(7))
    assert syncers.rows_of(1) == {0: 7, 1: 7}
