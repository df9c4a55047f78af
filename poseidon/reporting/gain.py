"""What simulated systems gain over PyTorch's DDP, against the rows that linear layers see, and where that ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poseidon.reporting.simulated import Cell

#: What is compared with.
BASE = "ddp"
#: A lead of less is none.
LEAST = 1.05


@dataclass(frozen=True)
class Gain:
    """One system on one cluster, beside DDP on the same.

    Attributes:
        rows: K, the rows that linear layers see.
        speed: DDP's seconds / its own.
        speedup: rows per second over those of one machine alone.
        bytes: that DDP sends / that it sends.
        least: the same, were each linear layer sent by the cheapest of ps, sfb and block.
    """

    system: str
    link: str
    nodes: int
    rows: int
    speed: float
    speedup: float
    bytes: float
    least: float


def gains(cells: Sequence[Cell]) -> list[Gain]:
    """Of all systems but DDP and single, where DDP is simulated too and several nodes exchange linear layers."""
    base = {(c.batch_size, c.link, c.outcome.nodes): c.outcome for c in cells if c.comm == BASE}
    found = []
    for cell in cells:
        own, other = cell.outcome, base.get((cell.batch_size, cell.link, cell.outcome.nodes))
        if cell.comm in (BASE, "single") or other is None or own.nodes < 2 or cell.linear_rows is None:
            continue
        speed, sent = other.seconds / own.seconds, other.bytes_sent
        found.append(
            Gain(
                *(cell.system, cell.link, own.nodes, cell.linear_rows),
                *(speed, own.speedup, sent / own.bytes_sent, sent / cell.least_bytes),
            )
        )
    return found


def last_rows(found: Sequence[Gain]) -> int | None:
    """The most rows with a lead, of one system on clusters of one size and link; None: there is no lead."""
    return max((gain.rows for gain in found if gain.speed >= LEAST), default=None)


def words(cells: Sequence[Cell]) -> list[str]:
    """A line per system and link: up to how many rows it gains something."""
    by_curve: dict[tuple[str, str], dict[int, list[Gain]]] = {}
    for gain in gains(cells):
        by_curve.setdefault((gain.system, gain.link), {}).setdefault(gain.nodes, []).append(gain)
    lines = []
    for (system, link), by_nodes in by_curve.items():
        told = []
        for nodes, found in by_nodes.items():
            last = last_rows(found)
            best = max(gain.speed for gain in found)
            told.append(f"{nodes} nodes: {f'K = {last}' if last is not None else 'nowhere'} (best {best:.2f} x)")
        lines.append(
            f"{link}: {system} leads {BASE} by {LEAST - 1:.0%} or more up to, of those simulated, {'; '.join(told)}"
        )
        everywhere = [gain for found in by_nodes.values() for gain in found]
        slow = sum(gain.speedup <= 1 for gain in everywhere)
        if slow:
            lines.append(f"  (in {slow} of its {len(everywhere)} cells it is slower than one machine alone)")
    return lines
