"""A rank that only owns shards: it has no model, and does what workers ask of it (P17, section 2.1)."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from poseidon.engine.device import Device
from poseidon.engine.exchange import POLL_SECONDS, WARN_SECONDS, Exchange
from poseidon.engine.syncers import compare_steps
from poseidon.errors import PeerLostError
from poseidon.planning import Book, Param, Scheme, build_book
from poseidon.schemes import Context, depth_of, make_scheme
from poseidon.transport import Header

log = logging.getLogger("poseidon")

#: Mailbox tag of plans, from rank 0 to the ranks that only serve.
TAG_SERVE = 7


def tell_servers(exchange: Exchange, model: int, plan: int, book: Book, options: Mapping[str, int]) -> None:
    """Training thread of rank 0: a plan begins; from these words every server builds the same book.

    Args:
        options: kv_bytes, merge_bytes and staleness; front: do front layers leave first?
    """
    servers = book.topology.apart
    if exchange.rank or not servers:
        return
    schemes = {book.params[unit.params[0]].name: unit.scheme for unit in book.units if unit.scheme != "ps"}
    text = json.dumps([model, [asdict(param) for param in book.params], schemes, dict(options)])
    for server in servers:
        exchange.say(server, 0, TAG_SERVE, text, plan)


def serve(exchange: Exchange, device: Device) -> None:
    """Serve until all workers have left.

    Raises:
        PeerLostError: a worker was lost, or others wait for it as long as the timeout. PoseidonError: a worker ended
            the run.
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
                model, book, options = _read(exchange, str(payload, "utf-8"))
                mine = shards.setdefault(model, [])
                mine.append(Shards(exchange, model, header.k, book, options, device))
                # Of the plan before it a worker may still wait for something; of that before, none does.
                for old in mine[:-2]:
                    old.close()
                del mine[:-2]
        exchange.check()
        for each in [one for several in shards.values() for one in several]:
            exchange.endpoint.post(partial(exchange.guarded, each.look, "cannot serve"))


def _read(exchange: Exchange, text: str) -> tuple[int, Book, dict[str, int]]:
    model, rows, schemes, options = json.loads(text)
    params = [Param(**{**row, "shape": tuple(row["shape"])}) for row in rows]
    sizes = {key: value for key, value in options.items() if key != "front"}
    return model, make_book(exchange, params, schemes, **sizes), options


def make_book(
    exchange: Exchange,
    params: Sequence[Param],
    schemes: Mapping[str, Scheme],
    *,
    kv_bytes: int,
    merge_bytes: int,
    staleness: int,
) -> Book:
    """The same on workers and servers."""
    # A device that is behind would keep the others of its node waiting for its part of a product.
    topology = replace(exchange.topology, shares=not staleness)
    return build_book(params, topology, schemes=schemes, kv_bytes=kv_bytes, merge_bytes=merge_bytes)


class _Begun(NamedTuple):
    """Of a round: who has begun it here first, after how many optimizer steps, and when."""

    rank: int
    steps: int
    time: float


class Shards:
    """Receiver of one (model, plan) on a rank that only serves."""

    def __init__(
        self, exchange: Exchange, model: int, plan: int, book: Book, options: Mapping[str, int], device: Device
    ) -> None:
        self._exchange, self._device, self._model, self._plan = exchange, device, model, plan
        self._book, self._options, self._depth = book, options, depth_of(options["staleness"])
        self._begun: dict[int, _Begun] = {}  # by round
        self._warn = WARN_SECONDS
        self._schemes = [
            make_scheme(
                unit,
                Context(
                    exchange.rank,
                    book.topology,
                    model,
                    plan,
                    getattr(torch, book.params[unit.params[0]].dtype.removeprefix("torch.")),
                    options["kv_bytes"],
                    self._depth,
                    self._send,
                    _nobody_waits,
                    device.multiplied,
                    self._summed,
                    has_values=device.has_values,
                    work=exchange.coder.work,
                ),
            )
            for unit in book.units
        ]
        exchange.open(model, plan, self)

    def on_message(self, header: Header, payload: memoryview) -> None:
        begun = self._begun.setdefault(header.round, _Begun(header.rank, header.step, time.monotonic()))
        if header.rank != begun.rank:
            compare_steps(header.round, {begun.rank: begun.steps, header.rank: header.step})
        self._begun = {old: its for old, its in self._begun.items() if old > header.round - 1 - self._depth}
        self._schemes[header.unit].on_message(header, payload)

    def on_through(self, rank: int) -> None:
        """What a rank that only goes along contributes comes like the others'."""

    def _send(self, peer: int, header: Header, payload: Any) -> None:
        header = header._replace(step=self._begun[header.round].steps)
        priority = self._book.priority(header.round, header.unit, front=bool(self._options["front"]))
        self._exchange.send(peer, header, payload, priority)

    def _summed(self, nbytes: int, call: Any) -> None:
        self._device.summed(nbytes, partial(self._exchange.guarded, call, "cannot sum"), self._exchange.endpoint.post)

    def look(self) -> None:
        """Endpoint's thread: workers wait here for another one, and cannot know for which.

        Raises:
            PeerLostError: it has left, or has been silent for the timeout.
        """
        now, longest, who = time.monotonic(), 0.0, ""
        for unit, scheme in zip(self._book.units, self._schemes, strict=True):
            for round_, rank in sorted(scheme.owed_by()):
                layer = self._book.params[unit.params[0]].layer or "(root)"
                phase = "push" if unit.scheme == "ps" else "factors"
                what = f"rank {rank}: {phase} of layer {layer}, iteration {round_}"
                if self._exchange.has_left(rank):
                    raise PeerLostError(rank, f"rank {rank} ended while others still wait for {what}")
                waited = now - self._begun[round_].time
                if waited > self._exchange.timeout:
                    me = self._exchange.rank
                    raise PeerLostError(rank, f"rank {me} waited {waited:.0f} s (comm.timeout) for {what}")
                if waited > longest:
                    longest, who = waited, what
        if longest < WARN_SECONDS:
            self._warn = WARN_SECONDS
        elif longest >= self._warn:
            log.warning("rank %d: has waited %.0f s for %s", self._exchange.rank, longest, who)
            self._warn += WARN_SECONDS

    def close(self) -> None:
        self._exchange.shut(self._model, self._plan)


def _nobody_waits(round_: int, unit: int, result: Sequence[Any] | None) -> None:
    raise AssertionError("a rank that only serves waits for no result")
