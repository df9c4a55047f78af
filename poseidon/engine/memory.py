"""Is there memory for the gradients that staleness lets wait?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from poseidon.errors import UserError
from poseidon.planning import Book, FactorSize, buffered

_GROUP = Path("/sys/fs/cgroup")


def available() -> int | None:
    """Bytes that processes of this machine may yet take, of the machine and of their control group; None: unknown."""
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
        limits.append(int((_GROUP / "memory.max").read_text()) - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no Linux, no group, or one without a limit
        pass
    return min(limits, default=None)


def check_memory(
    book: Book, rank: int, factors: Mapping[str, FactorSize], staleness: int, ranks_here: int, has_values: bool = True
) -> None:
    """Raises UserError, with the arithmetic, unless all ranks of this machine can be as far ahead as they may.

    Args:
        factors: as each node has them, by name of the weight that does not go by PS.
        has_values: False: this rank's own gradients take no memory.
    """
    free = available()
    if free is None:
        return
    need = buffered(book, rank, factors, staleness)
    own = need.gradients if has_values else 0
    total = (own + need.factors + need.shards) * ranks_here
    if total > free:
        raise UserError(
            f"comm.staleness={staleness}: up to {staleness + 1} iterations of gradients may wait to be applied, "
            f"{_size(own)} of gradients + {_size(need.factors)} of factors + {_size(need.shards)} of server shards on "
            f"each rank, x {ranks_here} ranks of this machine = {_size(total)}, and {_size(free)} are free: lower it"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
