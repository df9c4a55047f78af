"""An iteration as rows of bars: device, waits, copies, links, sums; a panel per run and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from poseidon.reporting.figures.canvas import head, new_figure
from poseidon.reporting.transfers import Transfer, transfers
from poseidon.tracing import Event, Row

if TYPE_CHECKING:
    from poseidon.reporting.timeline import TracedRun

#: Colour of a layer's kind: what its class's name contains.
_KINDS = (
    ("convolution", "#0072B2", ("Conv",)),
    ("linear", "#D55E00", ("Linear",)),
    ("normalisation", "#009E73", ("Norm",)),
    ("embedding", "#CC79A7", ("Embedding",)),
    ("attention", "#E69F00", ("Attention",)),
)
_OTHER, _STEP, _WAIT, _UNKNOWN = "#7B6FA0", "#000000", "#C9C9C9", "#555555"
#: Letters of a label that fit into the width; and the share of it that a bar must have to be told from the next.
_LETTERS, _EDGED = 155, 0.003
_INCHES = 0.3  # of a row


@dataclass(frozen=True)
class _Bar:
    start: float
    end: float
    color: str
    alpha: float = 1.0
    label: str = ""
    queued: float | None = None  # a thin line from here to its start
    hatch: str | None = None


#: A row's name, and its lanes of bars.
_Rows = list[tuple[str, list[list[_Bar]]]]


def draw(runs: Sequence[TracedRun], ranks: Sequence[int]) -> Figure:
    """Panels share the axis of time, so that lengths compare."""
    panels = [(run, rank, _rows(run, rank)) for run in runs for rank in ranks]
    heights = [max(2, len(rows)) * _INCHES for *_, rows in panels]
    figure = new_figure(10, 1.5 + sum(heights) + 0.55 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    kinds: dict[str, str] = {}
    end = max(_end(run, rank) for run, rank, _ in panels)
    for axes, (run, rank, rows) in zip(grid, panels, strict=True):
        axes.set_xlim(0, end * 1.01)
        _panel(axes, rows, end)
        seconds = [event.end - event.start for event in run.iterations]
        lasts = ", ".join(f"{each:.3g} s" for each in seconds)
        axes.set_title(f"{_name(run)}, rank {rank}: {lasts}", size=9.5)
        for iteration in run.iterations:
            axes.axvline(iteration.end - run.iterations[0].start, color="#333333", lw=0.8, ls=(0, (4, 2)), zorder=1)
        kinds |= {name: color for name, color in map(_kind, _kinds(run, rank)) if name}
    grid[-1].set_xlabel("seconds since the iteration began" + (", undilated" if _dilated(runs) else ""))
    handles = [Patch(color=color, label=name) for name, color in kinds.items()]
    handles += [
        Patch(color=_OTHER, alpha=0.5, label="forward: pale"),
        Patch(facecolor="white", edgecolor="#444444", hatch="////", label="reconstruction"),
        Patch(color=_STEP, label="optimizer step"),
        Patch(color=_WAIT, label="wait"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=8)
    numbers = list(map(str, runs[0].about["iterations"]))
    title = f"{runs[0].about['model']}: iteration{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
    head(figure, title, _subtitle(runs[0]))
    return figure


def _name(run: TracedRun) -> str:
    about = run.about
    return str(about["comm"]) + (f" (overlap={about['overlap']})" if about["overlap"] != "backward" else "")


def _subtitle(run: TracedRun) -> str:
    about = run.about
    parts = [f"{about['nodes']} nodes", f"{about['batch_size']} rows each"]
    if about["bandwidth"]:
        parts.append(f"links of {about['bandwidth']}")
    if about["hardware"]:
        parts.append(f"emulated {about['hardware']}, f = {about['time_dilation']:g}")
    parts.append(
        "send and receive: a lane per peer; a bar ends when the message came, and begins when it was queued and"
    )
    return " · ".join(parts) + " the one before it had come"


def _dilated(runs: Sequence[TracedRun]) -> bool:
    return any(run.about["time_dilation"] != 1 for run in runs)


def _end(run: TracedRun, rank: int) -> float:
    return max(event.end for event in run.ranks[rank]) - run.iterations[0].start


def _kinds(run: TracedRun, rank: int) -> Iterable[str]:
    """In the order of their first appearance."""
    return dict.fromkeys(str(event.details.get("kind", "")) for event in run.ranks[rank])


def _kind(name: str) -> tuple[str, str]:
    for kind, color, parts in _KINDS:
        if any(part in name for part in parts):
            return kind, color
    return ("other layers", _OTHER) if name else ("", _UNKNOWN)


def _rows(run: TracedRun, rank: int) -> _Rows:
    start = run.iterations[0].start
    events: dict[Row, list[Event]] = {row: [] for row in Row}
    for event in sorted(run.ranks[rank], key=lambda each: each.start):
        events[event.row].append(event)
    found = transfers(run.ranks)
    rows: _Rows = [
        ("device", [[_computing(event, start) for event in events[Row.device]]]),
        ("wait", [[_Bar(event.start - start, event.end - start, _WAIT) for event in events[Row.wait]]]),
        ("copies out", [[_plain(event, start) for event in events[Row.copy_out]]]),
        ("copies in", [[_plain(event, start) for event in events[Row.copy_in]]]),
        ("send", _lanes([t for t in found if t.sender == rank], lambda t: t.receiver, start)),
        ("receive", _lanes([t for t in found if t.receiver == rank], lambda t: t.sender, start)),
        ("sums", [[_plain(event, start) for event in events[Row.aggregate]]]),
        ("collectives", [_collectives(events[Row.collective], start)]),
    ]
    return [(name, lanes) for name, lanes in rows if any(lanes)]


def _color(event: Event) -> str:
    return _kind(str(event.details.get("kind", "")))[1]


def _plain(event: Event, start: float) -> _Bar:
    return _Bar(event.start - start, event.end - start, _color(event), label=_short(event))


def _short(event: Event) -> str:
    """The layer's name, of several the first one's."""
    return str(event.details.get("layer", "")) or event.name


def _computing(event: Event, start: float) -> _Bar:
    what = event.details.get("pass")
    if what == "optimizer step":
        return _Bar(event.start - start, event.end - start, _STEP)
    alpha, hatch = (0.45 if what == "forward" else 1.0), ("////" if what == "reconstruct" else None)
    return _Bar(event.start - start, event.end - start, _color(event), alpha, _short(event), hatch=hatch)


def _lanes(found: Sequence[Transfer], peer: Callable[[Transfer], int], start: float) -> list[list[_Bar]]:
    by_peer: dict[int, list[_Bar]] = {}
    for transfer in found:
        key = peer(transfer)
        bar = _Bar(transfer.start - start, transfer.end - start, _color(transfer.event), label=_short(transfer.event))
        by_peer.setdefault(key, []).append(bar)
    return [by_peer[key] for key in sorted(by_peer)]


def _collectives(events: Sequence[Event], start: float) -> list[_Bar]:
    """One after the other, as they become complete; each begins when it was asked for, or the one before it ended."""
    bars, free = [], 0.0
    for event in sorted(events, key=lambda each: each.end):
        begun = max(event.start, free)
        free = event.end
        name = event.name.partition(":")[0] if event.name.startswith("bucket") else _short(event)
        bars.append(_Bar(begun - start, event.end - start, _color(event), label=name, queued=event.start - start))
    return bars


def _panel(axes: Axes, rows: _Rows, width: float) -> None:
    axes.set_yticks([-number for number in range(len(rows))], [name for name, _ in rows])
    axes.set_ylim(-len(rows) + 0.45, 0.55)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    for number, (_, lanes) in enumerate(rows):
        height = 0.84 / len(lanes)
        for lane, bars in enumerate(lanes):
            _draw_lane(
                axes, bars, -number + 0.42 - (lane + 0.5) * height, height * (0.86 if len(lanes) > 1 else 1), width
            )


def _draw_lane(axes: Axes, bars: Sequence[_Bar], middle: float, height: float, width: float) -> None:
    groups: dict[tuple[str, float, str | None, bool], list[tuple[float, float]]] = {}
    for bar in bars:
        edge = bar.end - bar.start > _EDGED * width and bar.color != _WAIT
        groups.setdefault((bar.color, bar.alpha, bar.hatch, edge), []).append((bar.start, bar.end - bar.start))
        if bar.queued is not None and bar.queued < bar.start:
            axes.plot([bar.queued, bar.start], [middle, middle], color=bar.color, lw=0.8, zorder=2)
    for (color, alpha, hatch, edge), spans in groups.items():
        place = (middle - height / 2, height)
        axes.broken_barh(
            spans,
            place,
            facecolors=color,
            alpha=alpha,
            hatch=hatch,
            edgecolor="white" if edge else color,
            linewidth=0.4,
            zorder=3,
        )
    if height < 0.5:
        return
    for bar in bars:
        letters = (bar.end - bar.start) / width * _LETTERS
        if 0 < len(bar.label) < letters:
            color = "white" if bar.alpha == 1 and bar.color != _WAIT else "black"
            axes.text(
                (bar.start + bar.end) / 2, middle, bar.label, ha="center", va="center", size=6.5, color=color, zorder=5
            )
