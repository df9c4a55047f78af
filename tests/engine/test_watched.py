"""Whoever takes parameters out of a module's dictionary has looked at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from poseidon.engine.watched import Watched

LOOKS: list[Callable[[Watched], Any]] = [dict, lambda watched: {**watched}, lambda watched: watched.pop("weight")]


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_is_seen(look: Callable[[Watched], Any]) -> None:
    weight, seen = object(), set[int]()
    look(Watched({"weight": weight}, seen.update))
    assert id(weight) in seen


def test_what_is_not_there_is_nothing_to_look_at() -> None:
    seen = set[int]()
    assert Watched({}, seen.update).pop("bias", None) is None
    assert not seen
