"""A rank that only owns shards: it has no model, and does what workers ask of it (P17, section 2.1)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from poseidon.engine.device import Device
from poseidon.engine.exchange import POLL_SECONDS, Exchange
from poseidon.errors import OutOfStepError, PeerLostError
from poseidon.planning import Book, Param, Scheme, build_book
from poseidon.schemes import Context, make_scheme
from poseidon.transport import Header, Kind

#: Mailbox tag of plans, from rank 0 to the ranks that only serve.
TAG_SERVE = 7


def tell_servers(exchange: Exchange, model: int, plan: int, book: Book, options: Mapping[str, int]) -> None:
    """Training thread of rank 0: a plan begins; from these words every server builds the same book.

    Args:
        options: kv_bytes and merge_bytes.
    """
    servers = [rank for rank in book.topology.servers if not book.topology.works(rank)]
    if exchange.rank or not servers:
        return
    schemes = {book.params[unit.params[0]].name: unit.scheme for unit in book.units if unit.scheme != "ps"}
    text = json.dumps([model, [asdict(param) for param in book.params], schemes, dict(options)])
    for server in servers:
        exchange.say(server, 0, TAG_SERVE, text, plan)


def serve(exchange: Exchange, device: Device) -> None:
    """Serve until all workers have left.

    Raises:
        PeerLostError: a worker was lost. PoseidonError: a worker ended the run.
    """
    plans: SimpleQueue[Any] = SimpleQueue()
    exchange.watch(plans)
    exchange.collect(plans, 0, TAG_SERVE)
    shards: dict[int, list[Shards]] = {}
    while not all(map(exchange.has_left, exchange.topology.workers)):
        with contextlib.suppress(Empty):
            item = plans.get(timeout=POLL_SECONDS)
            if item is not None:
                header, payload = item
                model, book, piece_bytes = _read(exchange, str(payload, "utf-8"))
                mine = shards.setdefault(model, [])
                mine.append(Shards(exchange, model, header.k, book, piece_bytes, device))
                # Of the plan before it a worker may still wait for something; of that before, none does.
                for old in mine[:-2]:
                    old.close()
                del mine[:-2]
        exchange.check()
        if any(map(exchange.has_left, exchange.topology.workers)):
            for each in [one for several in shards.values() for one in several]:
                exchange.endpoint.post(partial(exchange.guarded, each.check_left, "cannot serve"))


def _read(exchange: Exchange, text: str) -> tuple[int, Book, int]:
    model, rows, schemes, options = json.loads(text)
    params = [Param(**{**row, "shape": tuple(row["shape"])}) for row in rows]
    typed: dict[str, Scheme] = schemes
    return model, build_book(params, exchange.topology, schemes=typed, **options), options["kv_bytes"]


class Shards:
    """Receiver of one (model, plan) on a rank that only serves."""

    def __init__(self, exchange: Exchange, model: int, plan: int, book: Book, piece_bytes: int, device: Device) -> None:
        self._exchange, self._device, self._model, self._plan = exchange, device, model, plan
        self._steps: dict[int, tuple[int, int]] = {}  # by round, who has begun it first, and after how many steps
        self._schemes = [
            make_scheme(
                unit,
                Context(
                    exchange.rank,
                    exchange.topology,
                    model,
                    plan,
                    getattr(torch, book.params[unit.params[0]].dtype.removeprefix("torch.")),
                    piece_bytes,
                    2,
                    self._send,
                    _nobody_waits,
                    device.multiplied,
                    self._summed,
                    has_values=device.has_values,
                ),
            )
            for unit in book.units
        ]
        exchange.open(model, plan, self)

    def on_message(self, header: Header, payload: memoryview) -> None:
        if header.kind in (Kind.CHANGED, Kind.BEGIN):
            return
        first, steps = self._steps.setdefault(header.round, (header.rank, header.step))
        if steps != header.step:
            raise OutOfStepError(
                f"{OutOfStepError.BEGINNING}: rank {first} has made {steps} optimizer steps, rank {header.rank} "
                f"{header.step} before backward pass {header.round}"
            )
        self._steps = {old: its for old, its in self._steps.items() if old >= header.round - 2}
        self._schemes[header.unit].on_message(header, payload)

    def on_through(self, rank: int) -> None:
        """What a rank that only goes along contributes comes like the others'."""

    def _send(self, peer: int, header: Header, payload: Any) -> None:
        self._exchange.send(peer, header._replace(step=self._steps[header.round][1]), payload)

    def _summed(self, nbytes: int, call: Any) -> None:
        self._device.summed(nbytes, partial(self._exchange.guarded, call, "cannot sum"), self._exchange.endpoint.post)

    def check_left(self) -> None:
        """Endpoint's thread: others wait here for one that has gone, and would not know."""
        for rank in sorted(set().union(*(scheme.owed_by() for scheme in self._schemes))):
            if self._exchange.has_left(rank):
                raise PeerLostError(rank, f"rank {rank} ended while others wait for its gradients")

    def close(self) -> None:
        self._exchange.shut(self._model, self._plan)


def _nobody_waits(round_: int, unit: int, result: Sequence[Any] | None) -> None:
    raise AssertionError("a rank that only serves waits for no result")
