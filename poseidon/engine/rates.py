"""What this cluster can do, found out at start for comm.rule=time: how fast a device multiplies, a host adds, and a
link carries; and for comm.sparse=auto: how fast that is, and a host codes. At most about a second, less on a fast link.

Every device sends to one of the next node and hears from one of the node before, all at once, as in training: so a
node's link is measured both ways, with the software in front of it, and shared as its devices share it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from poseidon.engine.broadcast import TAG_RATES
from poseidon.engine.exchange import Exchange
from poseidon.planning.time import Rates
from poseidon.schemes.coding import decode, encode, joined
from poseidon.transport import Header, Kind

#: Mailbox tags of texts.
_TAG_MINE, _TAG_ALL, _TAG_MORE = 12, 9, 10
_HOPS = 12
#: Bytes of one exchange: the first, and how they grow, as long as one takes less than so many seconds.
_FIRST, _GROWTH, _LAST = 32 * 1024, 4, 8 * 1024 * 1024
_PIECE = 1024 * 1024
_LONG_ENOUGH = 0.05
_SIDE = 768  # of the matrices that are multiplied
_ADDED = 1 << 23  # numbers, more than caches hold
_CODED = 1 << 18  # numbers that are coded


def measure(exchange: Exchange, model: int, device: torch.device, *, products: bool) -> Rates:
    """The same on every worker: of all the least. Collective among them; with one node nothing leaves it.

    Args:
        products: also how fast products and sums are made; else only what coding depends on.

    Raises:
        PeerLostError: a rank was lost or silent.
    """
    shared = device.type == "cpu"
    hop, link = _link(exchange, model)
    mine = Rates(link, hop, math.inf, shared=shared, code=_code())
    if products:
        host = None if shared else _multiply(torch.device("cpu"))
        mine = replace(mine, multiply=_multiply(device), add=_add(), host=host)
    workers = exchange.topology.workers
    if exchange.rank:
        exchange.say(0, model, _TAG_MINE, json.dumps(asdict(mine)))
        return Rates(**json.loads(exchange.hear(0, model, _TAG_ALL, "rates of the cluster")))
    theirs = [exchange.hear(peer, model, _TAG_MINE, "its rates") for peer in workers if peer]
    least = Rates.least([mine, *(Rates(**json.loads(text)) for text in theirs)])
    for peer in workers:
        if peer:
            exchange.say(peer, model, _TAG_ALL, json.dumps(asdict(least)))
    return least


def _multiply(device: torch.device) -> float:
    """FLOP/s."""
    matrix = torch.ones(_SIDE, _SIDE, device=device)
    return 2.0 * _SIDE**3 / _least_seconds(lambda: torch.mm(matrix, matrix), device)


def _add() -> float:
    """Bytes/s."""
    total, part = torch.zeros(_ADDED), torch.ones(_ADDED)
    return part.nbytes / _least_seconds(lambda: total.add_(part), torch.device("cpu"))


def _code() -> float:
    """Bytes/s of dense factors, coded or decoded."""
    generator = torch.Generator().manual_seed(0)
    half = torch.rand(_CODED, generator=generator)
    half[torch.rand(_CODED, generator=generator) < 0.5] = 0
    coded, cpu = encode(half), torch.device("cpu")
    data = joined([coded])
    seconds = _least_seconds(lambda: encode(half), cpu)
    seconds += _least_seconds(lambda: decode(data, [_CODED], [True], half.dtype), cpu)
    return 2 * half.nbytes / seconds


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of a few times; the first one is not counted."""
    seconds = []
    for _ in range(4):
        _finish(device)
        start = time.perf_counter()
        call()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return max(min(seconds[1:]), 1e-9)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _link(exchange: Exchange, model: int) -> tuple[float, float]:
    """Seconds of a hop, and bytes/s of a node."""
    topology = exchange.topology
    workers, devices = topology.workers, len(topology.nodes[0])
    place = workers.index(exchange.rank)
    right = workers[(place + devices) % len(workers)]
    left = workers[(place - devices) % len(workers)]
    data = torch.zeros(_LAST, dtype=torch.uint8).numpy().data
    hops = sorted(_pass_on(exchange, model, left, right, data[:8]) for _ in range(_HOPS))
    hop, size = hops[_HOPS // 2], _FIRST
    while True:
        seconds = _pass_on(exchange, model, left, right, data[:size])
        if size >= _LAST or not _all_want_more(exchange, model, seconds):
            break
        size *= _GROWTH
    seconds = min(seconds, _pass_on(exchange, model, left, right, data[:size]))  # what else runs here only slows it
    exchange.empty(Kind.STATE, left, model, TAG_RATES)
    return hop, size * devices / max(seconds - hop, 1e-6)


def _pass_on(exchange: Exchange, model: int, left: int, right: int, data: memoryview) -> float:
    """Seconds until the left one's data is here; this rank sends as much to the right."""
    header = Header(Kind.STATE, exchange.rank, model, unit=TAG_RATES, total=data.nbytes)

    def send() -> None:
        for offset in range(0, data.nbytes, _PIECE):
            exchange.endpoint.send(right, header._replace(offset=offset), data[offset : offset + _PIECE])

    start, got = time.perf_counter(), 0
    exchange.endpoint.post(send)
    while got < data.nbytes:
        got += exchange.receive(Kind.STATE, left, model, TAG_RATES, "an exchange to measure the link")[1].nbytes
    return time.perf_counter() - start


def _all_want_more(exchange: Exchange, model: int, seconds: float) -> bool:
    """As the slowest has it: a longer exchange is measured better, but on a slow link it lasts."""
    workers = exchange.topology.workers
    if exchange.rank:
        exchange.say(0, model, _TAG_MORE, str(seconds))
        return exchange.hear(0, model, _TAG_MORE, "how to go on measuring the link") == "more"
    slowest = max([seconds, *(float(exchange.hear(p, model, _TAG_MORE, "its seconds")) for p in workers if p)])
    more = slowest < _LONG_ENOUGH
    for peer in workers:
        if peer:
            exchange.say(peer, model, _TAG_MORE, "more" if more else "enough")
    return more
