"""Speedup over one machine against nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poseidon.reporting.figures.canvas import GREY, Look, head, looks, new_figure, plain_log2, where
from poseidon.reporting.published import Curve
from poseidon.reporting.sections import Configuration, Section

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
        }
        for configuration, speedup in points(section)
    ]
    theirs = [
        {"source": curve.word, "curve": curve.label, "nodes": nodes, "speedup": speedup}
        for curve in published
        for nodes, speedup in curve.points
    ]
    return [*measured, *theirs]


def points(section: Section) -> list[tuple[Configuration, Any]]:
    """Configurations with their speedup, in the order of the curves."""
    found = [(configuration, section.speedup(configuration)) for configuration in section.configurations]
    return [(configuration, speedup) for configuration, speedup in found if speedup is not None]


def draw(section: Section, published: Sequence[Curve]) -> Figure | None:
    """None if there is no speedup to tell, or of comm=single only."""
    measured = points(section)
    if all(configuration.comm == "single" for configuration, _ in measured):
        return None
    figure = new_figure(6.4, 5.0 + 0.19 * len(published))
    axes = figure.add_subplot()
    _limits(axes, measured, published)
    for curve, (color, marker, line) in zip(published, _cycle(len(published)), strict=True):
        x, y = zip(*curve.points, strict=True)
        label = curve.label
        axes.plot(x, y, line, color=color, marker=marker, ms=6, lw=1.1, zorder=2, label=label)
    _curves(axes, section, measured)
    axes.set_xlabel("worker nodes")
    axes.set_ylabel("speedup over one machine (comm=single)")
    _legends(figure, axes, any(configuration.oversubscribed for configuration, _ in measured), len(published))
    repeats = sorted({speedup.count for _, speedup in measured})
    counts = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    spread = "one run each, no spread known" if repeats == [1] else f"median of {counts} repeats, bars from min to max"
    head(figure, f"Speedup: {section.title}", f"{where(section)} · {spread}")
    return figure


def _limits(axes: Axes, measured: Sequence[tuple[Configuration, Any]], published: Sequence[Curve]) -> None:
    """Log2 both ways, with the linear line over the whole width."""
    theirs = [point for curve in published for point in curve.points]
    nodes = [configuration.nodes for configuration, _ in measured] + [n for n, _ in theirs]
    values = [v for _, s in measured for v in (s.low, s.high)] + [v for _, v in theirs]
    last = max([*nodes, 2])
    plain_log2(axes, 2**-0.2, last * 2**0.2, axis="x")
    plain_log2(axes, min([*values, 1]) / 1.2, max([*values, last]) * 1.2, axis="y")
    axes.plot([1, last], [1, last], "--", color="#444444", lw=1, zorder=1, label="linear")
    axes.axhline(1, color=GREY, lw=0.7, zorder=1)


def _curves(axes: Axes, section: Section, measured: Sequence[tuple[Configuration, Any]]) -> None:
    look = looks([(configuration.variant, configuration.comm) for configuration, _ in measured])
    for number, variant in enumerate(look):
        curve = [(c, s) for c, s in measured if c.variant == variant]
        shift = 2 ** (0.025 * (number - (len(look) - 1) / 2))  # so that points beside each other can be told apart
        _curve(axes, curve, look[variant], shift, several=any(s.count != curve[0][1].count for _, s in measured))


def _curve(axes: Axes, curve: Sequence[tuple[Configuration, Any]], look: Look, shift: float, *, several: bool) -> None:
    x = [configuration.nodes * shift for configuration, _ in curve]
    y = [speedup.median for _, speedup in curve]
    counts = sorted({speedup.count for _, speedup in curve})
    name = curve[0][0].variant
    if several:
        name += f" ({'-'.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} repeats)"
    errors = [[s.median - s.low for _, s in curve], [s.high - s.median for _, s in curve]]
    axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=look.color, elinewidth=1.2, zorder=3)
    axes.plot(x, y, ls=look.line, color=look.color, marker=look.marker, zorder=4, label=name)
    hollow = [(a, b) for a, b, (configuration, _) in zip(x, y, curve, strict=True) if configuration.oversubscribed]
    for a, b in hollow:
        axes.plot([a], [b], ls="none", marker=look.marker, mfc="white", mec=look.color, mew=1.4, zorder=5)


def _legends(figure: Figure, axes: Axes, oversubscribed: bool, published: int) -> None:
    """Measured curves in the free corner above the linear line; the papers' long names below the axes."""
    handles, labels = axes.get_legend_handles_labels()
    theirs, linear, ours = handles[1 : 1 + published], handles[:1], handles[1 + published :]
    names = labels[1 : 1 + published], labels[:1], labels[1 + published :]
    if oversubscribed:
        ours += axes.plot([], [], ls="none", marker="o", mfc="white", mec="#444444", mew=1.4)
        names[2].append("oversubscribed: ranks x threads > cores")
    axes.legend([*ours, *linear], [*names[2], *names[1]], loc="upper left")
    if published:
        figure.legend(theirs, names[0], loc="outside lower left", fontsize=8, labelcolor="#555555")


def _cycle(count: int) -> list[tuple[str, str, str]]:
    return [_GREYS[i % len(_GREYS)] for i in range(count)]
