"""Which of the simulated cells are worth the minutes of an emulated run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from poseidon.simulation.outcome import Outcome


@dataclass(frozen=True)
class Choice:
    """A number of nodes on links of one rate, to be emulated with all systems.

    Attributes:
        rate: bits/s.
        why: in words.
    """

    nodes: int
    rate: float
    why: str


def cells_to_emulate(
    outcomes: Mapping[tuple[int, float, str], Outcome], most_nodes: int = 8, most: int = 4
) -> list[Choice]:
    """Of (nodes, rate, system) those where an emulated run tells most: where systems differ most, and where a device
    and its link are about equally busy, so that the order of things decides and a simulation is least certain.

    Args:
        most_nodes: that can be emulated.
        most: of choices.
    """
    cells: dict[tuple[int, float], list[Outcome]] = {}
    for (nodes, rate, _), outcome in outcomes.items():
        if 2 <= nodes <= most_nodes:
            cells.setdefault((nodes, rate), []).append(outcome)
    spreads = {cell: max(_seconds(found)) / min(_seconds(found)) for cell, found in cells.items()}
    balances = {cell: min(_balance(outcome) for outcome in found) for cell, found in cells.items()}
    by_spread = sorted(cells, key=lambda cell: (-spreads[cell], cell))
    by_balance = sorted(cells, key=lambda cell: (balances[cell], cell))
    chosen: dict[tuple[int, float], str] = {}
    for one, other in zip(by_spread, by_balance, strict=True):
        chosen.setdefault(one, f"the slowest system takes {spreads[one]:.2f} x as long as the fastest")
        chosen.setdefault(other, f"device and link are equally busy within {balances[other]:.0%}")
    return [Choice(nodes, rate, why) for (nodes, rate), why in list(chosen.items())[:most]]


def _seconds(outcomes: Iterable[Outcome]) -> list[float]:
    return [outcome.seconds for outcome in outcomes]


def _balance(outcome: Outcome) -> float:
    """How far the busier of device and link is from the other, as a share of it."""
    one, other = outcome.busy["device"], outcome.busy["link"]
    return 1 - min(one, other) / max(one, other)
