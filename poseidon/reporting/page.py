"""``index.html`` of a report: one file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poseidon.config.paths import reports_dir

#: Stands in the page, so that a folder can be told to be a report.
GENERATOR = '<meta name="generator" content="poseidon report">'


@dataclass(frozen=True)
class Picture:
    """A figure of the page.

    Attributes:
        stem: of its files: ``figures/STEM.png``, ``figures/STEM.svg`` and ``data/STEM.csv``.
        source: the SVG as a data URI, so that the page alone shows it.
        caption: what is to be seen.
        wide: whether it has too many panels for a narrow screen.
    """

    stem: str
    source: str
    caption: str
    wide: bool = False

    @classmethod
    def of(cls, svg: Path, caption: str, *, wide: bool = False) -> Picture:
        data = base64.b64encode(svg.read_bytes()).decode("ascii")
        return cls(svg.stem, f"data:image/svg+xml;base64,{data}", caption, wide)


@dataclass(frozen=True)
class Dilation:
    """How much of emulated iterations is this machine's software.

    Attributes:
        notes: what the curves are of, and what cannot be told.
        advice: (why, command that makes what is missing).
    """

    rows: list[dict[str, str]]
    notes: list[str]
    advice: list[tuple[str, str]]


@dataclass
class Part:
    """A section of the page.

    Attributes:
        notes: of its speedups: what they are relative to.
        command: makes what the speedups lack; None if they lack nothing.
        missing: why there is no speedup, or None.
        rows: of its table, as people read them.
        words: about figures that are not there.
        baseline: what the speedups' baseline has in common with the runs beyond what all have.
        emulated: a line per emulated cost; empty: nothing is emulated.
        names: what the papers' names of its curves mean.
        others: published figures that are not drawn, and why.
        seconds: its table beside published ones.
        bounds: its table of what each emulated part has to do.
        departs: why these are not those.
        dilation: its table of time dilation, with notes and the command that makes what these lack.
    """

    title: str
    anchor: str
    facts: dict[str, str]
    notes: list[str]
    rows: list[dict[str, str]]
    speedup: Picture | None = None
    missing: str | None = None
    command: str | None = None
    published: list[str] = field(default_factory=list)
    training: list[Picture] = field(default_factory=list)
    traffic: Picture | None = None
    words: list[str] = field(default_factory=list)
    baseline: str = ""
    emulated: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    seconds: list[dict[str, str]] = field(default_factory=list)
    departs: list[str] = field(default_factory=list)
    bounds: list[dict[str, str]] = field(default_factory=list)
    dilation: Dilation | None = None


@dataclass(frozen=True)
class Page:
    """All that the template shows."""

    title: str
    experiment: str
    counts: str
    parts: Sequence[Part]
    warnings: Sequence[str]
    facts: Sequence[tuple[str, str]]
    differences: Sequence[tuple[str, str]]
    failures: Sequence[tuple[str, str, str]]
    runs: Sequence[dict[str, Any]]


def render(page: Page) -> str:
    """The HTML; everything that comes from a run is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(reports_dir() / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("index.html.j2").render(page=page)
