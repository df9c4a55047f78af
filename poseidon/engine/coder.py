"""Where factors are coded and decoded: a thread of its own, so that no message waits meanwhile.

Alternatives: the training thread, whose backward pass would wait; the endpoint's, which has every peer to serve. One
thread, as each factor is coded once, whatever the number of peers, and those of P - 1 peers are decoded as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from poseidon.engine.staged import Line


class Coder:
    """Of one session.

    Args:
        post: a call and what it does, to be made in the endpoint's thread; its errors end the run.
        failed: told what goes wrong otherwise.
    """

    def __init__(self, post: Callable[[Callable[[], None], str], None], failed: Callable[[Exception], None]) -> None:
        self._post, self._line = post, Line("poseidon-coder", failed)

    def work(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """`call` here, then `then`, with what it returned, in the endpoint's thread."""

        def run() -> None:
            try:
                end = partial(then, call())
            except Exception as error:
                end = partial(_raise, error)
            self._post(end, "cannot use coded factors")

        self._line.put(run)

    def close(self) -> None:
        self._line.close()


def _raise(error: Exception) -> None:
    raise error
