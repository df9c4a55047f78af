"""Median and 95 % interval of a few ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Student's t, two-sided 95 %, for 1, 2 ... 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
#: A lead is one from here on; less is called equal.
LEAD = 0.05


@dataclass(frozen=True)
class Estimate:
    """Of some values.

    Attributes:
        low, high: 95 % interval; of a single value, which tells nothing of its spread, that value.
    """

    median: float
    low: float
    high: float
    count: int

    @property
    def lead(self) -> str:
        """``ahead``, ``equal`` or ``behind``, of a ratio that is the better the larger it is; ``equal`` also where the
        interval holds 1."""
        if self.median >= 1 + LEAD and self.low > 1:
            return "ahead"
        return "behind" if self.median <= 1 / (1 + LEAD) and self.high < 1 else "equal"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Median, and Student's interval of the logarithms, as ratios multiply; None without values.

    Five values' own smallest and largest would hold the median with 94 %, whatever their distribution; this interval
    supposes that logarithms are normal, and reaches further. Where a value is 0, it is the values' own range.
    """
    if not values:
        return None
    median = statistics.median(values)
    if len(values) == 1 or min(values) <= 0:
        return Estimate(median, min(values), max(values), len(values))
    logs = [math.log(value) for value in values]
    middle, spread = statistics.fmean(logs), statistics.stdev(logs)
    half = _T[min(len(values) - 1, len(_T)) - 1] * spread / math.sqrt(len(values))
    return Estimate(median, math.exp(middle - half), math.exp(middle + half), len(values))
