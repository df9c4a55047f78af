"""Bytes that a node sends per iteration, by scheme, with what the plan said."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from poseidon.reporting.figures.canvas import color_of, head, new_figure, where
from poseidon.reporting.runs import stat
from poseidon.reporting.sections import Configuration, Section


def configurations(section: Section) -> list[Configuration]:
    """Those that send anything, by nodes."""
    sending = [c for c in section.configurations if c.nodes > 1 and any(run.bytes_by_scheme for run in c.runs)]
    return sorted(sending, key=lambda configuration: configuration.nodes)


def by_scheme(configuration: Configuration) -> dict[str, float]:
    """Median over the repeats, of dense bytes per iteration of the node that sends most."""
    schemes = sorted({scheme for run in configuration.runs for scheme in run.bytes_by_scheme})
    medians = {scheme: stat(run.bytes_by_scheme.get(scheme, 0.0) for run in configuration.runs) for scheme in schemes}
    return {scheme: found.median for scheme, found in medians.items() if found}


def planned(configuration: Configuration) -> float | None:
    """Of a run by PyTorch's DDP or FSDP there is no plan."""
    found = stat(run.bytes_planned for run in configuration.runs if not run.computed)
    return found.median if found else None


def computed(configuration: Configuration) -> bool:
    return any(run.computed for run in configuration.runs)


def rows(section: Section) -> list[dict[str, Any]]:
    """The tidy data of the figure: a row per bar's part."""
    return [
        {
            "curve": configuration.variant,
            "comm": configuration.comm,
            "nodes": configuration.nodes,
            "scheme": scheme,
            "bytes_dense_per_iteration": value,
            "bytes_planned_all_schemes": planned(configuration),
            "source": "computed" if computed(configuration) else "counted",
            "repeats": len(configuration.runs),
            "degree": section.facts["degree"],
        }
        for configuration in configurations(section)
        for scheme, value in by_scheme(configuration).items()
    ]


def draw(section: Section) -> Figure | None:
    """None if no run sent anything."""
    shown = configurations(section)
    if not shown:
        return None
    gaps = [0, *itertools.accumulate(before.nodes != after.nodes for before, after in itertools.pairwise(shown))]
    places = [i + 0.6 * gap for i, gap in enumerate(gaps)]
    figure = new_figure(6.4, 1.75 + 0.34 * (places[-1] + 1))
    axes = figure.add_subplot()
    unit, name = _unit(max(sum(by_scheme(c).values()) for c in shown))
    for place, configuration in zip(places, shown, strict=True):
        _bar(axes, place, configuration, unit)
    axes.set_yticks(places, [f"{c.nodes} nodes · {c.variant}" for c in shown])
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{name} sent per node and iteration (before any coding, without headers)")
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    _legend(figure, shown)
    head(figure, f"Traffic: {section.title}", f"{where(section)} · the node that sends most")
    return figure


def _bar(axes: Axes, place: float, configuration: Configuration, unit: float) -> None:
    left = 0.0
    hatch = "////" if computed(configuration) else None
    for scheme, value in by_scheme(configuration).items():
        width = value / unit
        axes.barh(place, width, 0.72, left, color=color_of(scheme), hatch=hatch, edgecolor="white", linewidth=0.8)
        left += width
    plan = planned(configuration)
    end = left
    if plan is not None:
        axes.plot([plan / unit] * 2, [place - 0.46, place + 0.46], color="black", lw=1.8, solid_capstyle="butt")
        end = max(end, plan / unit)
    axes.annotate(_amount(left), (end, place), (5, 0), textcoords="offset points", va="center", size=8.5)


def _legend(figure: Figure, shown: Sequence[Configuration]) -> None:
    schemes = sorted({scheme for configuration in shown for scheme in by_scheme(configuration)})
    hatched = {scheme for c in shown if computed(c) for scheme in by_scheme(c)}
    handles: list[Any] = [
        Patch(
            facecolor=color_of(scheme),
            edgecolor="white",
            hatch="////" if scheme in hatched else None,
            label=f"{scheme} (computed, not counted)" if scheme in hatched else f"{scheme} (counted)",
        )
        for scheme in schemes
    ]
    if any(planned(configuration) is not None for configuration in shown):
        handles.append(Line2D([], [], color="black", lw=1.8, ls="none", marker="|", ms=11, mew=1.8, label="planned"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4)


def _unit(most: float) -> tuple[float, str]:
    return next(
        ((size, name) for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= size), (1.0, "bytes")
    )


def _amount(value: float) -> str:
    return f"{value:.3g}"
