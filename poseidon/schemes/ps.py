"""PS: a unit's KV pairs go to the shards that own them, are averaged there, and come back (P17, section 2.1)."""

from __future__ import annotations

from functools import partial

import torch

from poseidon.planning import KVPair, Unit
from poseidon.schemes.average import Average
from poseidon.schemes.base import Context, Contribution
from poseidon.schemes.memory import from_bytes, raw
from poseidon.transport import Header, Kind


class PS:
    """Worker side of one unit, and the server side of the KV pairs that this rank owns."""

    def __init__(self, unit: Unit, context: Context) -> None:
        self.unit = unit
        self._context = context
        self._owned = {
            pair.index: Average(pair.length, context.world_size, context.dtype)
            for pair in unit.pairs
            if pair.server == context.rank
        }
        # Every worker starts with another shard, so that no server is asked by all at once.
        start = (context.rank + 1) % len(unit.pairs)
        self._order = unit.pairs[start:] + unit.pairs[:start]
        self._round = 0
        self._target: torch.Tensor | None = None
        self._waiting: set[int] = set()

    def contribute(self, round_: int, contribution: Contribution) -> None:
        """Push; from now on the averages are written into `contribution.dense`."""
        self._round = round_
        source = self._target = contribution.dense
        self._waiting = {pair.index for pair in self.unit.pairs}
        rows = contribution.rows
        data = None if source is None else raw(source)
        for pair in self._order:
            if pair.server == self._context.rank:
                # Of the contribution, not of the target: an earlier pair's result may have made one meanwhile.
                self._offer(pair, self._context.rank, rows, _slice(source, pair))
                continue
            header = self._header(Kind.PUSH if data is not None else Kind.PUSH_NONE, pair, rows)
            self._context.send(pair.server, header, None if data is None else data[self._bytes(pair)])

    def on_message(self, header: Header, payload: memoryview) -> None:
        pair = self.unit.pairs[header.pair]
        match header.kind:
            case Kind.PUSH:
                self._offer(pair, header.rank, header.rows, from_bytes(payload, self._context.dtype))
            case Kind.PUSH_NONE:
                self._offer(pair, header.rank, header.rows, None)
            case Kind.PULL:
                self._complete(pair, from_bytes(payload, self._context.dtype))
            case Kind.PULL_NONE:
                self._complete(pair, None)
            case _:
                raise RuntimeError(f"{header.kind.name} for unit {self.unit.index}, which goes by PS")

    def waits_for(self) -> list[tuple[str, int]]:
        result: list[tuple[str, int]] = []
        for index in sorted(self._waiting):
            pair = self.unit.pairs[index]
            if pair.server == self._context.rank:
                result += [("push", rank) for rank in self._owned[index].missing()]
            else:
                result.append(("pull", pair.server))
        return result

    def _offer(self, pair: KVPair, rank: int, rows: int, data: torch.Tensor | None) -> None:
        self._context.summed(0 if data is None else data.nbytes, partial(self._add, pair, rank, rows, data))

    def _add(self, pair: KVPair, rank: int, rows: int, data: torch.Tensor | None) -> None:
        average = self._owned[pair.index]
        if not average.offer(rank, rows, data):
            return
        result = average.take()
        header = self._header(Kind.PULL if result is not None else Kind.PULL_NONE, pair, 0)
        payload = None if result is None else raw(result)
        me, size = self._context.rank, self._context.world_size
        for peer in ((me + step) % size for step in range(1, size)):
            self._context.send(peer, header, payload)
        self._complete(pair, result)

    def _complete(self, pair: KVPair, result: torch.Tensor | None) -> None:
        if result is not None:
            if self._target is None:
                self._target = torch.empty(self.unit.numel, dtype=self._context.dtype)
            self._target[pair.offset : pair.offset + pair.length].copy_(result)
        self._waiting.remove(pair.index)
        if not self._waiting:
            self._context.done(self.unit.index, self._target if result is not None else None)

    def _bytes(self, pair: KVPair) -> slice:
        size = self.unit.itemsize
        return slice(pair.offset * size, (pair.offset + pair.length) * size)

    def _header(self, kind: Kind, pair: KVPair, rows: int) -> Header:
        context = self._context
        return Header(
            kind,
            context.rank,
            context.model,
            context.plan,
            self._round,
            self.unit.index,
            pair.index,
            rows=rows,
        )


def _slice(flat: torch.Tensor | None, pair: KVPair) -> torch.Tensor | None:
    return None if flat is None else flat[pair.offset : pair.offset + pair.length]
