"""Speedup over one machine against nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poseidon.reporting.figures.canvas import GREY, Look, head, looks, new_figure, plain_log2, where
from poseidon.reporting.published import Curve
from poseidon.reporting.runs import Stat
from poseidon.reporting.sections import Configuration, Section

#: Names that the corner above the linear line has room for.
_CORNER = 8
#: Labelled beside the powers of two where the range is small.
_BETWEEN = (0.75, 1.25, 1.5, 1.75, 2.5, 3, 3.5, 5, 6, 7)
#: What can be the limit of an emulated run -> its column.
_BOUNDS = (("CPU", "cpu_bound"), ("engine", "engine_bound"))
#: And the mark over its point, with what the legend says of it.
_MARKS: dict[str, tuple[dict[str, Any], str]] = {
    "CPU": ({"marker": "x", "ms": 9, "mec": "#000000", "mew": 1.1}, "cpu_bound: this machine's cores were the limit"),
    "engine": (
        {"marker": "o", "ms": 14, "mfc": "none", "mec": "#444444", "mew": 1.1},
        "engine_bound: at f = 1 the engine could not keep up",
    ),
}
_GREYS = (("#6f6f6f", "P", "-"), ("#8f8f8f", "X", "--"), ("#a8a8a8", "v", "-."), ("#5a5a5a", "d", ":"))


def rows(section: Section, published: Sequence[Curve]) -> list[dict[str, Any]]:
    """The tidy data of the figure: a row per point, measured ones first."""
    measured = [
        {
            "source": "measured",
            "curve": configuration.variant,
            "comm": configuration.comm,
            "nodes": configuration.nodes,
            "speedup": speedup.median,
            "speedup_min": speedup.low,
            "speedup_max": speedup.high,
            "repeats": speedup.count,
            "oversubscribed": configuration.oversubscribed,
            "degree": section.facts["degree"],
            **(_emulated(configuration) if section.emulated else {}),
        }
        for configuration, speedup in points(section)
    ]
    theirs = [
        {"source": curve.word, "curve": curve.label, "nodes": nodes, "speedup": speedup}
        for curve in published
        for nodes, speedup in curve.points
    ]
    return [*measured, *theirs]


def _emulated(configuration: Configuration) -> dict[str, Any]:
    return {"time_dilation": configuration.dilation, **{key: word in configuration.bounds for word, key in _BOUNDS}}


def points(section: Section) -> list[tuple[Configuration, Stat]]:
    """Configurations with their speedup, in the order of the curves."""
    found = [(configuration, section.speedup(configuration)) for configuration in section.configurations]
    return [(configuration, speedup) for configuration, speedup in found if speedup is not None]


def draw(section: Section, published: Sequence[Curve]) -> Figure | None:
    """None if there is no speedup to tell, or of comm=single only."""
    measured = points(section)
    if all(configuration.comm == "single" for configuration, _ in measured):
        return None
    figure = new_figure(6.4, 5.0)
    axes = figure.add_subplot()
    last = _limits(axes, measured, published)
    theirs = [_published(axes, curve, number) for number, curve in enumerate(published)]
    ours = _curves(axes, measured, last)
    axes.set_xlabel("worker nodes")
    axes.set_ylabel("speedup over one machine (comm=single)")
    if any(configuration.oversubscribed for configuration, _ in measured):
        label = "oversubscribed: ranks x threads > cores"
        ours += axes.plot([], [], ls="none", marker="o", mfc="white", mec="#444444", mew=1.4, label=label)
    for bound, (mark, label) in _MARKS.items():
        if any(bound in configuration.bounds for configuration, _ in measured):
            ours += axes.plot([], [], ls="none", label=label, **{**mark, "ms": 7})
    ours += axes.plot([1, last], [1, last], "--", color="#444444", lw=1, zorder=1, label="linear")
    room = len(ours) <= _CORNER and all(speedup.high < 1.3 * c.nodes for c, speedup in measured)
    _legends(figure, axes, ours, theirs, corner=room)
    head(figure, f"Speedup: {section.title}", f"{where(section)} · {_spread(measured)}")
    return figure


def _limits(axes: Axes, measured: Sequence[tuple[Configuration, Stat]], published: Sequence[Curve]) -> int:
    """Log2 both ways, as far as the linear line goes; gives the largest number of nodes."""
    theirs = [point for curve in published for point in curve.points]
    nodes = [configuration.nodes for configuration, _ in measured] + [n for n, _ in theirs]
    values = [v for _, s in measured for v in (s.low, s.high)] + [v for _, v in theirs]
    last = max([*nodes, 2])
    plain_log2(axes, "x", 2**-0.2, last * 2**0.2, nodes)
    low, high = min([*values, 1]) / 1.2, max([*values, last]) * 1.2
    plain_log2(axes, "y", low, high, _BETWEEN if high / low < 8 else ())
    axes.axhline(1, color=GREY, lw=0.7, zorder=1)
    return last


def _published(axes: Axes, curve: Curve, number: int) -> Artist:
    color, marker, line = _GREYS[number % len(_GREYS)]
    x, y = zip(*curve.points, strict=True)
    return axes.plot(x, y, line, color=color, marker=marker, ms=6, lw=1.1, zorder=2, label=curve.label)[0]


def _curves(axes: Axes, measured: Sequence[tuple[Configuration, Stat]], last: int) -> list[Artist]:
    look = looks([(configuration.variant, configuration.comm) for configuration, _ in measured])
    several = len({speedup.count for _, speedup in measured}) > 1
    span = 0.4 + math.log2(last)  # of the axis
    step = span * min(0.007, 0.035 / len(look))  # points beside each other stand a little apart
    found = []
    for number, variant in enumerate(look):
        curve = [(c, s) for c, s in measured if c.variant == variant]
        name = f"{variant} ({_counts(curve)})" if several else variant
        found.append(_curve(axes, curve, look[variant], 2 ** (step * (number - (len(look) - 1) / 2)), name))
    return found


def _curve(axes: Axes, curve: Sequence[tuple[Configuration, Stat]], look: Look, shift: float, name: str) -> Artist:
    x = [configuration.nodes * shift for configuration, _ in curve]
    y = [speedup.median for _, speedup in curve]
    errors = [[s.median - s.low for _, s in curve], [s.high - s.median for _, s in curve]]
    axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=look.color, elinewidth=1.2, zorder=3)
    (line,) = axes.plot(x, y, ls=look.line, color=look.color, marker=look.marker, zorder=4, label=name)
    for a, b, (configuration, _) in zip(x, y, curve, strict=True):
        if configuration.oversubscribed:
            axes.plot([a], [b], ls="none", marker=look.marker, mfc="white", mec=look.color, mew=1.4, zorder=5)
        for bound in configuration.bounds:
            axes.plot([a], [b], ls="none", zorder=6, **_MARKS[bound][0])
    return line


def _legends(figure: Figure, axes: Axes, ours: Sequence[Artist], theirs: Sequence[Artist], *, corner: bool) -> None:
    """Measured curves in the corner above the linear line if that is free; the papers' long names below the axes."""
    below = list(theirs)
    if corner:
        axes.legend(handles=ours, loc="upper left")
    else:
        below = [*ours, *theirs]
    if below:
        columns = 1 if theirs else 2
        figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(below) / columns))
        figure.legend(handles=below, loc="outside lower left", fontsize=8, ncols=columns)


def _spread(measured: Sequence[tuple[Configuration, Stat]]) -> str:
    if all(speedup.count == 1 for _, speedup in measured):
        return "one run each, no spread known"
    return f"median of {_counts(measured)}, bars from min to max"


def _counts(curve: Sequence[tuple[Configuration, Stat]]) -> str:
    least, most = min(s.count for _, s in curve), max(s.count for _, s in curve)
    return f"{least} to {most} repeats" if least < most else f"{most} repeat{'s' if most > 1 else ''}"
