"""PS: a unit's KV pairs go to the shards that own them, are averaged there, and come back (P17, section 2.1).

Of a node with several devices one, the pair's delegate, averages what they have before it leaves the node, and hands
on what comes back (the third of P15's levels).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from poseidon.planning import KVPair, Unit
from poseidon.schemes.average import Average
from poseidon.schemes.base import Context, Contribution
from poseidon.schemes.memory import from_bytes, raw
from poseidon.transport import Header, Kind


class _Round:
    """What a worker waits for in one round: averages are written into `target`."""

    def __init__(self, target: torch.Tensor | None, pairs: tuple[KVPair, ...]) -> None:
        self.target = target
        self.waiting = {pair.index for pair in pairs}


class PS:
    """Worker side of one unit, and the server side of the KV pairs that this rank owns."""

    def __init__(self, unit: Unit, context: Context) -> None:
        self.unit = unit
        self._context = context
        me, topology = context.rank, context.topology
        self._node = topology.node_of(me)
        self._beside = topology.beside(me)
        self._first: list[int] = []  # by pair, who gets what this rank has; none on a rank that only serves
        self._merged: dict[int, Average] = {}  # of this node's devices, where this rank speaks for them
        self._owned: dict[int, Average] = {}  # of all nodes
        for pair in unit.pairs:
            if self._node is not None:
                delegate = topology.delegate(self._node, pair.server, unit.index + pair.index)
                self._first.append(delegate if self._beside else pair.server)
                if self._beside and delegate == me:
                    self._merged[pair.index] = self._average(pair, len(topology.nodes[self._node]))
            if pair.server == me:
                self._owned[pair.index] = self._average(pair, len(topology.nodes))
        # Every worker starts with another shard, so that no server is asked by all at once.
        start = (me + 1) % len(unit.pairs)
        self._order = unit.pairs[start:] + unit.pairs[:start]
        self._rounds: dict[int, _Round] = {}

    def _average(self, pair: KVPair, parts: int) -> Average:
        return Average(pair.length, parts, self._context.dtype, self._context.depth)

    def contribute(self, round_: int, contribution: Contribution) -> None:
        """Push; from now on the averages are written into `contribution.dense`."""
        source, rows, me = contribution.dense, contribution.rows, self._context.rank
        self._rounds[round_] = _Round(source, self.unit.pairs)
        data, size = None if source is None else raw(source), self.unit.itemsize
        for pair in self._order:
            # Of the contribution, not of the target: an earlier pair's result may have made one meanwhile.
            if self._first[pair.index] == me:
                self._offer(round_, pair, me, rows, _slice(source, pair))
                continue
            payload = None if data is None else data[pair.offset * size : (pair.offset + pair.length) * size]
            self._push(round_, pair, self._first[pair.index], rows, payload)

    def _push(self, round_: int, pair: KVPair, to: int, rows: int, payload: memoryview | None) -> None:
        header = self._header(Kind.PUSH_NONE if payload is None else Kind.PUSH, round_, pair, rows)
        self._context.send(to, header, payload)

    def on_message(self, header: Header, payload: memoryview) -> None:
        pair, round_ = self.unit.pairs[header.pair], header.round
        match header.kind:
            case Kind.PUSH:
                self._offer(round_, pair, header.rank, header.rows, from_bytes(payload, self._context.dtype))
            case Kind.PUSH_NONE:
                self._offer(round_, pair, header.rank, header.rows, None)
            case Kind.PULL | Kind.PULL_NONE:
                result = None if header.kind is Kind.PULL_NONE else from_bytes(payload, self._context.dtype)
                if header.rank not in self._beside:
                    self._hand_on(round_, pair, result, list(self._beside))
                self._complete(round_, pair, result)
            case _:
                raise RuntimeError(f"{header.kind.name} for unit {self.unit.index}, which goes by PS")

    def waits_for(self) -> list[tuple[str, int]]:
        result: list[tuple[str, int]] = []
        topology, me = self._context.topology, self._context.rank
        for round_ in sorted(self._rounds)[:1]:
            for index in sorted(self._rounds[round_].waiting):
                pair, to = self.unit.pairs[index], self._first[index]
                if to != me:
                    result.append(("pull", to))
                    continue
                assert self._node is not None
                devices = topology.nodes[self._node]
                missing = [devices[part] for part in self._merged[index].missing(round_)] if self._beside else []
                if not missing and pair.server != me:
                    result.append(("pull", pair.server))
                elif not missing:
                    nodes = self._owned[index].missing(round_)
                    missing = [topology.delegate(node, me, self.unit.index + index) for node in nodes]
                result += [("push", rank) for rank in missing]
        return result

    def owed_by(self) -> set[tuple[int, int]]:
        topology, me = self._context.topology, self._context.rank
        return {
            (round_, topology.delegate(node, me, self.unit.index + index))
            for index, average in self._owned.items()
            for round_, node in average.lacking()
        }

    def _offer(self, round_: int, pair: KVPair, rank: int, rows: int, data: torch.Tensor | None) -> None:
        """Of one device of this node, or of another node."""
        local = bool(self._beside) and self._context.topology.node_of(rank) == self._node
        add = partial(self._merge if local else self._add, round_, pair, rank, rows, data)
        self._context.summed(0 if data is None else data.nbytes, add)

    def _merge(self, round_: int, pair: KVPair, rank: int, rows: int, data: torch.Tensor | None) -> None:
        average = self._merged[pair.index]
        if not average.offer(round_, self._context.topology.device_of(rank), rows, data):
            return
        rows, result = average.take(round_)
        if pair.server != self._context.rank:
            self._push(round_, pair, pair.server, rows, None if result is None else raw(result))
            return
        add = partial(self._add, round_, pair, pair.server, rows, result)
        self._context.summed(0 if result is None else result.nbytes, add)

    def _add(self, round_: int, pair: KVPair, rank: int, rows: int, data: torch.Tensor | None) -> None:
        average, topology, me = self._owned[pair.index], self._context.topology, self._context.rank
        node = topology.node_of(rank)
        assert node is not None
        if not average.offer(round_, node, rows, data):
            return
        # Copied, not sent from there: what is still to be sent must not change when the user changes the gradient.
        target = _slice(self._rounds[round_].target, pair) if self._node is not None else None
        _, result = average.take(round_, target)
        self._hand_on(round_, pair, result, topology.delegates(me, self.unit.index + pair.index))
        if self._node is not None:
            self._hand_on(round_, pair, result, list(self._beside))
            self._complete(round_, pair, result, written=target is not None)

    def _hand_on(self, round_: int, pair: KVPair, result: torch.Tensor | None, peers: list[int]) -> None:
        header = self._header(Kind.PULL_NONE if result is None else Kind.PULL, round_, pair, 0)
        payload = None if result is None else raw(result)
        for peer in peers:
            self._context.send(peer, header, payload)

    def _complete(self, round_: int, pair: KVPair, result: torch.Tensor | None, written: bool = False) -> None:
        state = self._rounds[round_]
        if result is not None and not written:
            if state.target is None:
                state.target = torch.empty(self.unit.numel, dtype=self._context.dtype)
            state.target[pair.offset : pair.offset + pair.length].copy_(result)
        state.waiting.remove(pair.index)
        if not state.waiting:
            del self._rounds[round_]
            self._context.done(round_, self.unit.index, state.target if result is not None else None)

    def _header(self, kind: Kind, round_: int, pair: KVPair, rows: int) -> Header:
        context = self._context
        return Header(kind, context.rank, context.model, context.plan, round_, self.unit.index, pair.index, rows=rows)


def _slice(flat: torch.Tensor | None, pair: KVPair) -> Any:
    return None if flat is None else flat[pair.offset : pair.offset + pair.length]
