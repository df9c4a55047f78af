"""Dividing rows among those that take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def cut(rows: int, part: int, shares: Sequence[float]) -> range:
    """Part's contiguous piece of ``range(rows)``, as large as its share of all shares, within a row.

    Rounds up, so that part 0 has rows whenever anybody has: batch-norm statistics are rank 0's.
    """
    exact = [Fraction(share) for share in shares]
    whole = sum(exact)
    return range(math.ceil(rows * sum(exact[:part]) / whole), math.ceil(rows * sum(exact[: part + 1]) / whole))
