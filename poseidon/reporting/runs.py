"""A tracked run as the report sees it. What a record lacks, or has in another form than expected, is None."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETED = "completed"
#: (iteration, value), by iteration.
History = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Stat:
    """Median, smallest and largest of some repeats."""

    median: float
    low: float
    high: float
    count: int


def stat(values: Iterable[float | None]) -> Stat | None:
    """Of the values that are there; None if none is."""
    known = [value for value in values if value is not None]
    return Stat(statistics.median(known), min(known), max(known), len(known)) if known else None


def number(value: Any) -> float | None:
    """The value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def largest(values: Any) -> float | None:
    """Of a list with an entry per rank."""
    known = [number(value) for value in values] if isinstance(values, (list, tuple)) else []
    return max((value for value in known if value is not None), default=None)


@dataclass(frozen=True, eq=False)
class Run:
    """One job.

    Attributes:
        status: completed, failed, interrupted or running; only completed runs are averaged.
        summary: content of summary.json, see docs/records.md; {} if the run left none.
        params: the config, flattened with dots.
        histories: of the metrics that are drawn, by name.
    """

    run_id: str
    name: str
    status: str
    error: str | None
    summary: Mapping[str, Any]
    params: Mapping[str, str] = field(default_factory=dict)
    histories: Mapping[str, History] = field(default_factory=dict)

    def text(self, key: str, default: str = "?") -> str:
        value = self.summary.get(key)
        return default if value is None else str(value)

    def whole(self, key: str, default: int = 0) -> int:
        value = number(self.summary.get(key))
        return default if value is None else int(value)

    def value(self, key: str) -> float | None:
        return number(self.summary.get(key))

    @property
    def comm(self) -> str:
        return self.text("comm")

    @property
    def nodes(self) -> int:
        return self.whole("nodes", 1)

    @property
    def speed(self) -> float | None:
        """Images per second of all nodes; None after fewer than two iterations."""
        speed = self.value("images_per_second")
        return speed if speed and speed > 0 else None

    @property
    def iteration_seconds(self) -> float | None:
        seconds = self.summary.get("iteration_seconds")
        return number(seconds.get("median")) if isinstance(seconds, Mapping) else None

    @property
    def stall_share(self) -> float | None:
        """Of the time of an iteration, spent waiting for communication: of means, as some iterations wait for long."""
        spread = self.summary.get("iteration_seconds")
        mean = number(spread.get("mean")) if isinstance(spread, Mapping) else None
        stall, seconds = self.value("stall_seconds"), mean or self.iteration_seconds
        return stall / seconds if stall is not None and seconds else None

    @property
    def bytes_sent(self) -> float | None:
        """Per iteration, by the node that sends most."""
        return largest(self.summary.get("bytes_sent_per_iteration"))

    @property
    def bytes_dense(self) -> float | None:
        """The same before factors were coded, and without headers."""
        return largest(self.summary.get("bytes_dense_per_iteration"))

    @property
    def bytes_planned(self) -> float | None:
        return largest(self.summary.get("bytes_planned_per_iteration"))

    @property
    def bytes_by_scheme(self) -> dict[str, float]:
        """Dense bytes per iteration; the sum of all schemes under "all" in records that do not split it."""
        split = self.summary.get("bytes_by_scheme")
        known = {str(k): number(v) for k, v in split.items()} if isinstance(split, Mapping) else {}
        if not known:
            total = largest(self.summary.get("bytes_dense_per_iteration"))
            known = {self.comm if self.comm in ("ps", "ddp", "fsdp") else "all": total}
        return {scheme: value for scheme, value in sorted(known.items()) if value}

    @property
    def computed(self) -> bool:
        """Whether its bytes were computed, not counted."""
        return self.summary.get("bytes_source") == "computed"

    @property
    def oversubscribed(self) -> bool:
        return bool(self.summary.get("oversubscribed"))

    @property
    def emulated(self) -> bool:
        return self.summary.get("degree") == "emulated"

    @property
    def emulated_costs(self) -> list[str]:
        """What takes an emulated time, such as ``layers`` and ``network``."""
        costs = self.summary.get("emulated_costs")
        return [str(cost) for cost in costs] if self.emulated and isinstance(costs, (list, tuple)) else []

    @property
    def sleeps(self) -> bool:
        """Whether its accelerators are emulated, and so can be dilated."""
        return "layers" in self.emulated_costs

    @property
    def dilation(self) -> float:
        """f, by which all times here are divided already."""
        factor = self.value("time_dilation")
        return factor if self.emulated and factor and factor > 0 else 1.0

    @property
    def bounds(self) -> tuple[str, ...]:
        """What of this machine's was the limit of an emulated run: ``CPU``, ``engine``. Who computes for real is
        always limited by the CPU."""
        limits = (("CPU", "cpu_bound"), ("engine", "engine_bound"))
        return tuple(word for word, key in limits if self.emulated and self.summary.get(key) is True)

    @property
    def throughput_only(self) -> bool:
        return bool(self.summary.get("throughput_only"))

    @property
    def host(self) -> Mapping[str, Any]:
        host = self.summary.get("host")
        return host if isinstance(host, Mapping) else {}

    @property
    def host_type(self) -> str:
        """What a host has in common with others of its kind."""
        cores = self.host.get("cores")
        return f"{self.host.get('cpu') or 'unknown CPU'}, {cores if cores is not None else '?'} cores"

    @property
    def versions(self) -> Mapping[str, Any]:
        versions = self.summary.get("versions")
        return versions if isinstance(versions, Mapping) else {}

    @property
    def overrides(self) -> list[str]:
        overrides = self.summary.get("overrides")
        return [str(override) for override in overrides] if isinstance(overrides, (list, tuple)) else []
