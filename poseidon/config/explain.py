"""Hydra's and OmegaConf's exceptions in one line that names the key and what it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def explain(error: Exception) -> str:
    return " ".join(str(error).split()) + (": " + " ".join(str(error.__cause__).split()) if error.__cause__ else "")


def explain_missing(keys: Sequence[str], cfg: Any) -> str:
    return f"{keys[0]} is missing"
