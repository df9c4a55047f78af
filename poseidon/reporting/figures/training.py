"""Loss or accuracy against iterations and against seconds, a panel per number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from poseidon.reporting.curves import Point, joined, panels
from poseidon.reporting.figures.canvas import Look, head, looks, new_figure, where
from poseidon.reporting.sections import Configuration, Section

#: Panels beside each other.
_COLUMNS = 4
_AXES = (("iteration", "iteration"), ("seconds", "seconds since the first iteration"))


def draw(section: Section, metric: str, name: str, *, percent: bool = False) -> Figure | None:
    """None if no run has this metric.

    Args:
        metric: such as ``train/loss``.
        name: what it is, in words.
        percent: whether it is a fraction, to be shown in percent.
    """
    curves = {c: joined(c.runs, metric) for c in section.configurations}
    shown = {nodes: [c for c in found if curves[c]] for nodes, found in panels(section).items()}
    shown = {nodes: found for nodes, found in shown.items() if found}
    if not shown:
        return None
    columns = min(len(shown), _COLUMNS)
    bands = -(-len(shown) // columns)
    figure, grid = _grid(bands, columns)
    scale = 100.0 if percent else 1.0
    look = looks([(c.variant, c.comm) for c in section.configurations])
    for axis, fields in zip(_AXES, grid, strict=True):
        for axes in fields[len(shown) :]:
            axes.set_axis_off()
        for place, (axes, (nodes, found)) in enumerate(zip(fields, shown.items(), strict=False)):
            _panel(axes, {c: curves[c] for c in found}, look, axis, scale)
            axes.set_title(_title(nodes, len(shown), axis[0]))
            if place % columns == 0:
                axes.set_ylabel(f"{name}, %" if percent else name)
    _log_if_wide(figure.axes[0], [p for found in curves.values() for p in found], percent=percent)
    _legend(figure, section, shown, look)
    spread = "bands: min to max of the repeats" if any(len(c.runs) > 1 for c in curves) else "one run each"
    head(figure, f"{name.capitalize()}: {section.title}", f"{where(section)} · {spread}")
    return figure


def _grid(bands: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    """A figure, and its panels: against iterations, and below, or beside if there is but one, against seconds."""
    if bands * columns == 1:
        figure = new_figure(7.4, 3.7)
        left, right = figure.subplots(1, 2, sharey=True)
        return figure, [[left], [right]]
    figure = new_figure(max(7.4, 2.9 * columns), 1.15 + 2 * bands * 2.3)
    rows = figure.subplots(2 * bands, columns, sharey=True, squeeze=False)
    return figure, [list(rows[:bands].flat), list(rows[bands:].flat)]


def _panel(
    axes: Axes,
    curves: Mapping[Configuration, Sequence[Point]],
    look: Mapping[str, Look],
    axis: tuple[str, str],
    scale: float,
) -> None:
    """Wide lines under narrow ones: where comms do exactly the same, all of them can be seen."""
    for number, (configuration, points) in enumerate(curves.items()):
        known = [point for point in points if axis[0] == "iteration" or point.seconds is not None]
        x = [point.iteration if axis[0] == "iteration" else point.seconds or 0.0 for point in known]
        drawn = look[configuration.variant]
        y = [scale * point.median for point in known]
        every = max(1, len(known) // 8)
        axes.plot(
            x,
            y,
            color=drawn.color,
            ls=drawn.line,
            marker=drawn.marker,
            markevery=(min(number * every // max(len(curves), 1), max(len(known) - 1, 0)), every),
            ms=5.5,
            lw=max(1.2, 3.0 - 0.6 * number),
            zorder=2 + number,
        )
        low, high = [scale * point.low for point in known], [scale * point.high for point in known]
        axes.fill_between(x, low, high, color=drawn.color, alpha=0.15, lw=0, zorder=1)
    axes.set_xlabel(axis[1])
    axes.set_xlim(0, _end(curves, axis[0]))


def _end(curves: Mapping[Configuration, Sequence[Point]], axis: str) -> float | None:
    """Of the axis: one process with fewer rows may need many times as long, and would squeeze the others."""
    last = {c: getattr(points[-1], axis) or 0.0 for c, points in curves.items()}
    several = [end for c, end in last.items() if c.comm != "single"]
    return 1.04 * min(max(last.values()), 2.5 * max(several)) or None if several else None


def _title(nodes: int, panels: int, axis: str) -> str:
    words = "against iterations" if axis == "iteration" else "against seconds"
    count = "1 node" if nodes == 1 else f"{nodes} nodes"
    return f"{count}, {words}" if panels < 3 else count


def _log_if_wide(axes: Axes, points: Sequence[Point], *, percent: bool) -> None:
    """A loss that falls by more than a factor of 20 is only readable on a logarithmic axis."""
    values = [point.median for point in points]
    if not percent and min(values) > 0 and max(values) / min(values) > 20:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _legend(
    figure: Figure, section: Section, shown: Mapping[int, Sequence[Configuration]], look: Mapping[str, Look]
) -> None:
    names: dict[str, Look] = {}
    for configuration in section.configurations:
        if any(configuration in found for found in shown.values()):
            single = configuration.comm == "single" and "rows" not in configuration.variant
            suffix = f" ({configuration.rows} rows)" if single else ""
            names[f"{configuration.variant}{suffix}"] = look[configuration.variant]
    handles = [
        Line2D([], [], color=drawn.color, ls=drawn.line, marker=drawn.marker, ms=6, label=name)
        for name, drawn in names.items()
    ]
    room, lengths = figure.get_figwidth() * 72, [5.0 * len(name) + 46 for name in names]  # points
    columns = len(names) if sum(lengths) <= room else max(1, int(room / max(lengths)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)
