"""What a section of emulated runs has beyond others': costs, time dilation, and seconds beside the papers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poseidon.reporting import bounds, dilation, emulated, seconds, tables
from poseidon.reporting.advice import dilated_command
from poseidon.reporting.page import Dilation, Part
from poseidon.reporting.published import Curve, Published, on_links
from poseidon.reporting.sections import Configuration, Section
from poseidon.tracking.folder import write_text


def emulation(part: Part, section: Section, experiment: str, uri: str | None, folder: Path) -> None:
    """Adds to the page's part, and writes the data of its tables."""
    part.emulated = emulated.basis(section.runs)
    part.names = emulated.papers_names(section.runs)
    if section.sleeps:
        part.baseline = f" Also the same emulated hardware, and the same time dilation, f = {section.dilation:g}."
        work = bounds.rows(section)
        _write(folder, f"{section.slug}-bounds", work)
        part.bounds = [tables.shown_bounds(row) for row in work]
        rows = dilation.rows(dilation.pairs(section))
        _write(folder, f"{section.slug}-dilation", rows)
        shown = [tables.shown_dilation(row) for row in rows]
        part.dilation = Dilation(shown, notes(section), advice(section, experiment, uri))


def published(part: Part, section: Section, curves: Sequence[Curve], known: Published, folder: Path) -> list[Curve]:
    """The table of seconds beside the papers' curves, and which of these are of other links.

    Args:
        curves: of the same model.

    Returns:
        Those of the same links, which may be drawn.
    """
    same, others = on_links(curves, emulated.bandwidth(section.links or section.first))
    rows = seconds.rows(section, same)
    _write(folder, f"{section.slug}-seconds", rows)
    part.seconds = [tables.shown_seconds(row) for row in rows]
    shown = {row["published"] for row in rows}
    part.departs = [f"{c.system}: {c.departs}" for c in same if c.departs and f"{c.paper} {c.system}" in shown]
    for curve in others:
        points = ", ".join(f"{speedup:.3g} x on {nodes} node{'s' * (nodes > 1)}" for nodes, speedup in curve.points)
        part.others.append(f"{curve.label}: {points}")
    part.others += [f"{name}: {known.papers[name]}" for name in dict.fromkeys(curve.paper for curve in others)]
    return same


def _write(folder: Path, stem: str, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        write_text(folder / "data" / f"{stem}.csv", tables.write_csv(rows))


def notes(section: Section) -> list[str]:
    """Of a section that can be dilated: which f its curves are of, and what cannot be told."""
    found = [f"All curves, speedups and measurements of this section are of runs at f = {section.dilation:g}."]
    if section.elsewhere:
        found[0] = (
            found[0][:-1] + ": of the f that most of its cells have, the smallest. Others stand in this table only."
        )
    left = [f"{_cell(c)} (f = {c.dilation:g})" for c in dilation.apart(section)]
    if left:
        found.append(f"In no curve, as they were not run at f = {section.dilation:g}: {'; '.join(left)}.")
    pairs = dilation.pairs(section)
    if any(pair.difference is not None and pair.bounds for pair in pairs):
        found.append("Where a limit is named, W(f) = f A + B need not hold, and the comparison with T(1) says little.")
    if any(pair.software < 0 or pair.dilated < 0 for pair in pairs):
        found.append("A negative A or B: the runs differ by more than the software takes. Repeat them.")
    if pairs and all(pair.alone is None for pair in pairs):
        found.append("No cell was run at f = 1 and at two others, f and 2f, so nothing here tests A + B.")
    return found


def advice(section: Section, experiment: str, uri: str | None) -> list[tuple[str, str]]:
    """What is missing to tell software from the emulated cluster, with the command for one cell."""
    several = [c for c in section.configurations if c.comm != "single" and c.seconds]
    found = dilation.pairs(section)
    if not several or section.dilation == 1:
        return []
    if not found:
        most = max(reversed(several), key=lambda c: c.nodes)
        double = 2 * section.dilation
        why = f"No cell was run at f = {section.dilation:g} and at {double:g}, which would tell how much of the time "
        why += "is this machine's software. This makes such a run of one:"
        return [(why, dilated_command(most.runs[0], double, experiment, uri))]
    if all(pair.alone is None for pair in found):
        tested = {(pair.curve, pair.nodes, pair.rows) for pair in found if pair.nodes > 1 and pair.factor > 1}
        least = min((c for c in several if (c.variant, c.nodes, c.rows) in tested), key=lambda c: c.nodes, default=None)
        if least is not None:
            return [("This makes the run at f = 1:", dilated_command(least.runs[0], 1.0, experiment, uri))]
    return []


def _cell(configuration: Configuration) -> str:
    nodes = configuration.nodes
    return f"{configuration.variant}, {nodes} node{'s' if nodes > 1 else ''}"
