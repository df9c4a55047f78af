"""Which process is this? A forked child inherits objects that only the process that made them may use."""

from __future__ import annotations

import os

_forks = 0  # between the first process and this one


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Owner:
    """The process that makes this object."""

    __slots__ = ("_forks",)

    def __init__(self) -> None:
        self._forks = _forks

    def here(self) -> bool:
        return self._forks == _forks
