from __future__ import annotations

import pytest

from poseidon.config.units import format_rate, parse_rate, parse_seconds
from poseidon.errors import UserError


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10gbit", 10e9), ("2.5gbit", 2.5e9), ("250mbit", 250e6), ("64kbit", 64e3), ("1 GBit", 1e9), (".5gbit", 5e8)],
)
def test_rates_are_bits_per_second(text, rate):
    assert parse_rate("key", text) == rate


# In tc's language bps are bytes, in others' bits: neither is taken.
@pytest.mark.parametrize("text", ["", "10", "gbit", "0gbit", "-1gbit", "10gb", "10gbps", "1e3mbit", "inf", "1gbit/s"])
def test_other_rates_are_refused_by_key(text):
    with pytest.raises(UserError, match=rf"^cluster.bandwidth={text}: must be a rate in kbit, mbit or gbit"):
        parse_rate("cluster.bandwidth", text)


@pytest.mark.parametrize(("text", "seconds"), [("0.1ms", 1e-4), ("50us", 50e-6), ("1s", 1.0), ("0ms", 0.0)])
def test_times_are_seconds(text, seconds):
    assert parse_seconds("key", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "ms", "-1ms", "5 minutes", "nan"])
def test_other_times_are_refused_by_key(text):
    with pytest.raises(UserError, match=f"^cluster.latency={text}: must be a time in us, ms or s"):
        parse_seconds("cluster.latency", text)


@pytest.mark.parametrize("text", ["10gbit", "2.5gbit", "250mbit", "64kbit", "0.5kbit"])
def test_rates_are_printed_as_they_are_written(text):
    assert format_rate(parse_rate("key", text)) == text
