"""Enums as configs know them."""

from __future__ import annotations

from enum import Enum


class Choice(Enum):
    """One of a few words, which are both the names and the values; printed as the word that a user types."""

    def __str__(self) -> str:
        return self.name
