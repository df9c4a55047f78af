"""What all figures share: colours, the style, and files that depend on the data alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from poseidon.config.paths import reports_dir
from poseidon.reporting.sections import Section

#: Okabe and Ito's colours, and a marker for each, so that nothing is told by colour alone. Schemes of a layer (ps,
#: sfb) have the colour of the comm that uses nothing else.
_LOOKS = {
    "single": ("#000000", "*"),
    "ddp": ("#CC79A7", "s"),
    "fsdp": ("#56B4E9", "P"),
    "ps": ("#D55E00", "^"),
    "sfb": ("#009E73", "D"),
    "hybrid": ("#0072B2", "o"),
    "block": ("#44AA99", "D"),
    "rows": ("#F0E442", "h"),
    "project_adam": ("#8C6D31", "v"),
    "adam": ("#8C6D31", "v"),
    "downpour": ("#E69F00", "<"),
}
_OTHERS = (("#999933", "X"), ("#666666", "p"))
_LINES = ("-", (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
#: Of a comm's variants, in this order.
_SHADES = (0.0, 0.45, -0.4, 0.65, -0.7)
GREY = "#777777"


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    color: str
    marker: str
    line: str | tuple[int, tuple[float, ...]]


def looks(variants: Sequence[tuple[str, str]]) -> dict[str, Look]:
    """Of each curve, given as (name, comm): colour and marker are the comm's, in all figures; lines and shades tell its
    variants apart."""
    found: dict[str, Look] = {}
    drawn: dict[str, int] = {}
    for name, comm in variants:
        if name not in found:
            color, marker = _LOOKS.get(comm) or _OTHERS[zlib.crc32(comm.encode()) % len(_OTHERS)]
            number = drawn.get(comm, 0)
            found[name] = Look(_shaded(color, _SHADES[number % len(_SHADES)]), marker, _LINES[number % len(_LINES)])
            drawn[comm] = drawn.get(comm, 0) + 1
    return found


def _shaded(color: str, share: float) -> str:
    """So far on the way to white, or, below 0, to black."""
    end = 255 if share > 0 else 0
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (end - c) * abs(share)):02X}" for c in channels)


def color_of(scheme: str) -> str:
    return looks([(scheme, scheme)])[scheme].color


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults and our style, whatever the user's own settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(mpl.rc_params_from_file(reports_dir() / "poseidon.mplstyle", use_default_template=False))
        yield


def new_figure(width: float, height: float) -> Figure:
    """Inches. No pyplot: no window system, no state that outlives the figure."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def head(figure: Figure, title: str, subtitle: str) -> None:
    """A title, and below it in grey what the numbers are."""
    height = figure.get_figheight()
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - 0.56 / height))
    above = figure.text(0.01, 1 - 0.08 / height, title, ha="left", va="top", weight="bold", size=11.5)
    below = figure.text(0.01, 1 - 0.32 / height, subtitle, ha="left", va="top", size=8.5, color="#555555")
    _fit(figure, above, 11.5)
    _fit(figure, below, 8.5)


def _fit(figure: Figure, text: Text, size: float) -> None:
    """Makes a text of this size smaller if it would not fit into the figure's width."""
    share = text.get_window_extent().width / (0.98 * figure.bbox.width)
    if share > 1:
        text.set_fontsize(size / share)


def where(section: Section) -> str:
    """Degree of reality and type of host, which stand in every figure; of emulated runs also the time dilation that
    all of them have."""
    dilated = f" at f = {section.dilation:g}" if section.sleeps else ""
    return f"degree: {section.facts['degree']}{dilated} · {section.facts['host type']}"


def save(figure: Figure, stem: Path, suffixes: Sequence[str] = (".png", ".svg")) -> list[Path]:
    """Writes ``stem``.png and ``stem``.svg: the same bytes for the same figure."""
    metadata = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
    options: dict[str, dict[str, Any]] = {".png": {"pil_kwargs": {"optimize": True}}, ".svg": {}}
    files = [stem.with_name(stem.name + suffix) for suffix in suffixes]
    for file, suffix in zip(files, suffixes, strict=True):
        figure.savefig(file, metadata=metadata[suffix], **options[suffix])
        figure.set_layout_engine("none")  # it is laid out now
    return files


def plain_log2(axes: Axes, which: Literal["x", "y"], low: float, high: float, extra: Iterable[float] = ()) -> None:
    """A log2 axis with plain numbers at the powers of two, and at ``extra`` values."""
    axes.set(**{f"{which}lim": (low, high)})
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    axis = axes.xaxis if which == "x" else axes.yaxis
    ticks = {*(2.0**k for k in range(-10, 21)), *extra}
    axis.set_major_locator(FixedLocator(sorted(tick for tick in ticks if low <= tick <= high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
