"""What hybrid gains over DDP against the rows that linear layers see: speed, a panel per link, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poseidon.reporting.figures.canvas import head, new_figure, plain_log2
from poseidon.reporting.gain import BASE, Gain, gains

if TYPE_CHECKING:
    from poseidon.reporting.simulated import Simulation

#: By number of nodes, ascending: Okabe and Ito's.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINES = ("-", (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))
_LIMIT = "#B00020"


def draw(simulation: Simulation) -> Figure | None:
    """None if DDP was not simulated, or there is nothing beside it."""
    found = gains(simulation.cells)
    if not found:
        return None
    links = list(dict.fromkeys(gain.link for gain in found))
    figure = new_figure(3.6 * (len(links) + 1) + 0.4, 4.3)
    grid = figure.subplots(1, len(links) + 1, sharey=True, squeeze=False)[0]
    handles: list[Artist] = []
    for axes, link in zip(grid, links, strict=False):
        on_link = [gain for gain in found if gain.link == link]
        handles = _curves(axes, on_link, lambda gain: gain.speed)
        _hollow(axes, [gain for gain in on_link if gain.speedup <= 1])
        axes.set_title(f"speed, {link}")
    of_bytes = [gain for gain in found if gain.link == links[0]]
    _curves(grid[-1], of_bytes, lambda gain: gain.bytes)
    dotted = _curves(grid[-1], of_bytes, lambda gain: gain.least, thin=True)
    grid[-1].set_title("bytes that a node sends")
    systems = list(dict.fromkeys(gain.system for gain in found))
    grid[0].set_ylabel(f"{BASE} / {' or '.join(systems)}")
    highest = max(max(gain.speed, gain.bytes, gain.least) for gain in found)
    lowest = min(1.0, *(min(gain.speed, gain.bytes) for gain in found))
    rows = sorted({gain.rows for gain in found})
    for axes in grid:
        plain_log2(axes, "x", rows[0] / 1.2, rows[-1] * 1.2)
        plain_log2(axes, "y", min(0.8, lowest / 1.1), highest * 1.15)
        axes.set_xlabel("rows per node that linear layers see (K)")
        limit = axes.axhline(1, color=_LIMIT, lw=1.4, zorder=2, label="nothing is gained")
        axes.axhspan(1e-3, 1, color=_LIMIT, alpha=0.07, lw=0)
    least = dotted[:1]
    if least:
        least[0].set_label("cheapest of ps, sfb and block")
    figure.legend(handles=[*handles, *least, limit], loc="outside lower left", ncols=5)
    title = f"{simulation.model}: {' and '.join(systems)} beside {BASE}"
    hollow = " · hollow: slower than one machine alone" if any(gain.speedup <= 1 for gain in found) else ""
    head(figure, title, f"degree: simulated on {simulation.hardware} · software takes no time{hollow}")
    return figure


def _hollow(axes: Axes, found: Sequence[Gain]) -> None:
    axes.plot([g.rows for g in found], [g.speed for g in found], ls="", marker="o", ms=2.6, color="white", zorder=5)


def _curves(axes: Axes, found: Sequence[Gain], value: Callable[[Gain], float], *, thin: bool = False) -> list[Artist]:
    """The curves' handles."""
    handles: list[Artist] = []
    counts = sorted({gain.nodes for gain in found})
    systems = list(dict.fromkeys(gain.system for gain in found))
    for system in systems[:1] if thin else systems:
        for number, nodes in enumerate(counts):
            curve = sorted((g for g in found if (g.system, g.nodes) == (system, nodes)), key=lambda gain: gain.rows)
            handles += axes.plot(
                [gain.rows for gain in curve],
                [value(gain) for gain in curve],
                ls=":" if thin else _LINES[systems.index(system) % len(_LINES)],
                lw=1.0 if thin else 1.8,
                marker="" if thin else _MARKERS[number % len(_MARKERS)],
                ms=5.5,
                color=_COLORS[number % len(_COLORS)],
                zorder=3 if thin else 4,
                label=f"{nodes} nodes" + (f", {system}" if len(systems) > 1 else ""),
            )
    return handles
