"""Simulated speedup over one machine against nodes, a panel per rate of the links."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poseidon.reporting.figures.canvas import GREY, head, looks, new_figure, plain_log2

if TYPE_CHECKING:
    from poseidon.reporting.simulated import Cell, Simulation

#: Panels beside each other.
_COLUMNS = 3


def draw(simulation: Simulation) -> Figure | None:
    """None if there is one number of nodes only: there is no curve."""
    by_link: dict[str, list[Cell]] = {}
    for cell in simulation.cells:
        by_link.setdefault(cell.link, []).append(cell)
    if len({cell.outcome.nodes for cell in simulation.cells}) < 2:
        return None
    columns = min(_COLUMNS, len(by_link))
    lines = math.ceil(len(by_link) / columns)
    figure = new_figure(max(6.4, 3.4 * columns), 1.1 + 3.2 * lines)
    grid = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes in grid[len(by_link) :]:
        axes.set_axis_off()
    handles: list[Artist] = []
    for axes, (link, cells) in zip(grid, by_link.items(), strict=False):
        handles = _panel(axes, cells)
        axes.set_title(link)
        axes.set_xlabel("worker nodes")
    grid[0].set_ylabel("speedup over one machine")
    counts = sorted({cell.outcome.nodes for cell in simulation.cells})
    speedups = [cell.outcome.speedup for cell in simulation.cells]
    plain_log2(grid[0], "x", min(counts) * 2**-0.2, max(counts) * 2**0.2, counts)
    plain_log2(grid[0], "y", min([*speedups, 1]) / 1.2, max([*speedups, *counts]) * 1.2)
    figure.legend(handles=handles, loc="outside lower left", ncols=8 if columns == _COLUMNS else 4)
    head(figure, f"Speedup: {simulation.title}", "degree: simulated · software takes no time")
    return figure


def _panel(axes: Axes, cells: list[Cell]) -> list[Artist]:
    """The curves' handles."""
    handles: list[Artist] = []
    for name, look in looks([(cell.system, cell.comm) for cell in cells]).items():
        curve = [cell.outcome for cell in cells if cell.system == name]
        x, y = [found.nodes for found in curve], [found.speedup for found in curve]
        handles += axes.plot(x, y, ls=look.line, color=look.color, marker=look.marker, ms=5, zorder=4, label=name)
    last = max(cell.outcome.nodes for cell in cells)
    axes.axhline(1, color=GREY, lw=0.7, zorder=1)
    return [*handles, *axes.plot([1, last], [1, last], "--", color="#444444", lw=1, zorder=1, label="linear")]
