"""Ranks that have more steps than others: who is through goes along with the others' rounds, without rows.

Each rank says when it is through, after how many rounds and steps. In the end everyone takes the state of the rank
that made most steps, as a rank that goes along does not know when the others step. Nobody leaves before all know that
all are through: a rank that did not would go along with what another one begins after it has left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from poseidon.engine.engine import Engine
from poseidon.engine.exchange import TAG_THROUGH, Exchange

#: Mailbox tag of the word that a rank knows all to be through.
_TAG_ALL_THROUGH = 13


def join(exchange: Exchange, engines: Sequence[Engine]) -> None:
    """Collective, but ranks may come at different times: returns when all are through.

    Raises:
        PeerLostError: a rank was lost, or left without this.
    """
    news: SimpleQueue[Any] = SimpleQueue()
    mine = [[engine.round, engine.stepping.count] for engine in engines]
    through = {exchange.rank: mine}
    exchange.watch(news)
    exchange.collect(news, 0, TAG_THROUGH)
    for engine in engines:
        engine.drain()
        engine.listen(lambda: news.put("a round"))
    for peer in range(exchange.world_size):
        if peer != exchange.rank:
            exchange.say(peer, 0, TAG_THROUGH, json.dumps(mine), exchange.joins)
    try:
        while not _done(exchange, engines, through):
            if _go_along(exchange, engines, through):
                continue
            item = exchange.take(news, lambda: _missing(exchange, through))
            if item != "a round":
                header, payload = item
                through[header.rank] = json.loads(bytes(payload))
    finally:
        exchange.unwatch(news)
        for engine in engines:
            engine.listen(None)
    others = [peer for peer in range(exchange.world_size) if peer != exchange.rank]
    for peer in others:
        exchange.say(peer, 0, _TAG_ALL_THROUGH, "")
    for peer in others:
        exchange.hear(peer, 0, _TAG_ALL_THROUGH, "end of session.join()")
    exchange.joins += 1
    for number, engine in enumerate(engines):
        steps = {rank: state[number][1] for rank, state in through.items()}
        source = max(sorted(steps), key=lambda rank: steps[rank])
        engine.take_over(source, steps[source])


def _last(engines: Sequence[Engine], through: dict[int, list[list[int]]]) -> list[int]:
    """By engine, the rounds that are known to be made."""
    return [max(state[number][0] for state in through.values()) for number in range(len(engines))]


def _go_along(exchange: Exchange, engines: Sequence[Engine], through: dict[int, list[list[int]]]) -> bool:
    for engine, last in zip(engines, _last(engines, through), strict=True):
        if engine.go_along(engine.round < last):
            return True
    return False


def _done(exchange: Exchange, engines: Sequence[Engine], through: dict[int, list[list[int]]]) -> bool:
    everyone = len(through) == exchange.world_size
    return everyone and all(e.round >= last for e, last in zip(engines, _last(engines, through), strict=True))


def _missing(exchange: Exchange, through: dict[int, list[list[int]]]) -> list[tuple[str, int]]:
    return [("next step, or session.join()", rank) for rank in range(exchange.world_size) if rank not in through]
