"""Rates and times as a user writes them: ``10gbit``, ``0.1ms``."""

from __future__ import annotations

import re

from poseidon.errors import UserError

#: As tc counts: powers of 1000.
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]+)", re.IGNORECASE)


def parse_rate(key: str, text: str) -> float:
    """Bits per second. Raises UserError, naming the config's ``key``."""
    rate = _parse(text, _RATES)
    if not rate:
        raise UserError(f"{key}={text}: must be a rate in kbit, mbit or gbit (per second), such as 10gbit or 250mbit")
    return rate


def parse_seconds(key: str, text: str) -> float:
    """Seconds, 0 among them. Raises UserError, naming the config's ``key``."""
    seconds = _parse(text, _TIMES)
    if seconds is None:
        raise UserError(f"{key}={text}: must be a time in us, ms or s, such as 0.1ms or 50us")
    return seconds


def format_rate(rate: float) -> str:
    """Bits per second as :func:`parse_rate` reads them, to four digits."""
    unit, size = next(((u, s) for u, s in reversed(_RATES.items()) if rate >= s), ("kbit", 1e3))
    return f"{rate / size:.4g}{unit}"


def _parse(text: str, units: dict[str, float]) -> float | None:
    found = _QUANTITY.fullmatch(text.strip())
    unit = units.get(found[2].lower()) if found else None
    return float(found[1]) * unit if found and unit else None
