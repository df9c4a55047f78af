"""What a benchmark has found: ``table.md``, ``bars.csv`` and ``variants.csv``, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.bench.records import Record
from poseidon.bench.results import CaseResult, bar_rows, variant_rows
from poseidon.bench.suite import Suite
from poseidon.errors import UserError
from poseidon.reporting.provenance import facts
from poseidon.reporting.runs import Run
from poseidon.reporting.tables import DASH, text, write_csv
from poseidon.tracking.folder import write_text

if TYPE_CHECKING:
    from rich.table import Table

BARS_CAPTION = (
    "medians over pairs of neighbouring runs, with 95 % intervals; x ddp: how many times as fast as ddp; equal: a lead "
    "under 5 %, or one that the interval does not confirm; open: the median misses a bar that lies within the interval"
)
VARIANTS_CAPTION = (
    "per iteration, medians over the runs; total: mean with the final drain; bound: the larger of the device's work "
    "and bytes sent / link rate; exposed: waiting for communication; Gbit/s: of a node, and what its busiest thread "
    "could fill; cores: that a real node would need; f: time dilation, by which times are divided"
)


def shown_bars(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows of :func:`poseidon.bench.results.bar_rows` as people read them."""
    return [
        {
            "case": row["case"],
            "variant": row["variant"],
            "figure": row["words"],
            "median": text(row["median"], "{:.3f}"),
            "95 % interval": _interval(row),
            "pairs": str(row["pairs"]),
            "bar": _bar(row),
            "ideal": text(row["ideal"], "{:.4g}"),
            "": ", ".join(word for word in (row["verdict"], row["lead"]) if word) or DASH,
        }
        for row in rows
    ]


def shown_variants(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows of :func:`poseidon.bench.results.variant_rows` as people read them."""
    return [
        {
            "case": row["case"],
            "variant": row["variant"],
            "nodes": str(row["nodes"]),
            "runs": str(row["runs"]),
            "s": text(row["iteration_seconds"], "{:.4g}"),
            "total": text(row["mean_seconds_with_drain"], "{:.4g}"),
            "bound": text(row["bound_seconds"], "{:.4g}"),
            "s/bound": text(row["over_bound"], "{:.3f}"),
            "exposed": text(row["exposed_seconds"], "{:.3g}"),
            "MB sent": _sent(row),
            "Gbit/s": text(row["gbit_per_second"], "{:.3g}"),
            "thread's": text(row["gbit_per_thread_second"], "{:.3g}"),
            "CPU s": text(row["cpu_seconds"], "{:.3g}"),
            "per GB": text(row["cpu_seconds_per_gb"], "{:.2f}"),
            "cores": text(row["cores_per_node"], "{:.2f}"),
            "f": text(row["time_dilation"], "{:g}"),
            "limit": _limits(row),
        }
        for row in rows
    ]


def _sent(row: Mapping[str, Any]) -> str:
    star = "*" if row["bytes_sent"] and row["bytes_source"] == "computed" else ""
    return text(row["bytes_sent"] or None, "{:.4g}", 1e-6) + star


def _interval(row: Mapping[str, Any]) -> str:
    return f"{row['low']:.3f} to {row['high']:.3f}" if row["pairs"] > 1 else DASH


def _bar(row: Mapping[str, Any]) -> str:
    least, most = row["at_least"], row["at_most"]
    words = [f"\N{GREATER-THAN OR EQUAL TO} {least:g}"] if least is not None else []
    return " ".join(words + ([f"\N{LESS-THAN OR EQUAL TO} {most:g}"] if most is not None else [])) or DASH


def _limits(row: Mapping[str, Any]) -> str:
    sleeps = row["emulated_hardware"] is not None  # who computes for real is always limited by the cores
    words = [("cores", row["cpu_bound"] and sleeps), ("engine", row["engine_bound"] and sleeps)]
    return ", ".join(word for word, is_so in words if is_so) or DASH


def tables(results: Sequence[CaseResult]) -> list[tuple[str, list[dict[str, str]], str]]:
    """(heading, rows, caption) of what is there to be shown."""
    bars = shown_bars(row for result in results for row in bar_rows(result) if result.rounds)
    variants = shown_variants(row for result in results for row in variant_rows(result))
    found = [("Bars", bars, BARS_CAPTION), ("Variants", variants, VARIANTS_CAPTION)]
    return [(heading, rows, caption) for heading, rows, caption in found if rows]


def render(heading: str, rows: Sequence[Mapping[str, str]], caption: str, width: int) -> Table:
    """For a terminal of so many columns; what finds no room there stands in the files."""
    from rich.table import Table

    table = Table(title=heading, title_justify="left", caption=caption, caption_justify="left")
    names = [name for name in rows[0] if width >= WIDE or name not in _WIDE_ONLY]
    for name in names:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


#: Columns of a terminal that shows all.
WIDE = 170
_WIDE_ONLY = ("nodes", "runs", "total", "bound", "Gbit/s", "thread's", "per GB", "f", "ideal", "pairs", "exposed")
_WORDS = ("case", "variant", "figure", "", "limit")


def write(suite: Suite, results: Sequence[CaseResult], records: Sequence[Record], command: str, folder: Path) -> Path:
    """Writes all files; gives the one for people.

    Raises:
        UserError: they cannot be written.
    """
    try:
        write_text(folder / "bars.csv", write_csv([row for result in results for row in bar_rows(result)]))
        write_text(folder / "variants.csv", write_csv([row for result in results for row in variant_rows(result)]))
        write_text(folder / "table.md", markdown(suite, results, records, command))
    except OSError as error:
        raise UserError(f"bench.folder: cannot write {error.filename or folder}: {error.strerror}") from error
    return folder / "table.md"


def markdown(suite: Suite, results: Sequence[CaseResult], records: Sequence[Record], command: str) -> str:
    """The whole page."""
    lines = [f"# {suite.name}: {suite.what}", "", f"`{command}`; each run's record: `raw.jsonl`", ""]
    lines += [*(f"* {case.name}: {case.what}" for case in suite.cases), ""]
    for heading, rows, caption in tables(results):
        lines += [f"## {heading}", "", *_markdown_table(rows), "", f"{caption[0].upper()}{caption[1:]}.", ""]
    notes = [f"* {result.case.name}: {note}" for result in results for note in result.notes]
    lines += ["## Not measured", "", *notes, ""] if notes else []
    lines += ["## Where and when", "", *(f"* {line}" for line in provenance(records)), ""]
    return "\n".join(lines)


def provenance(records: Sequence[Record]) -> list[str]:
    """Dates, host, versions and commits of the runs."""
    if not records:
        return []
    days = sorted({str(record.summary.get("started"))[:10] for record in records})
    runs = [Run("", r.case, str(r.summary.get("status")), None, r.summary) for r in records]
    spent = sum(record.seconds for record in records)
    return [
        f"date: {' to '.join(dict.fromkeys((days[0], days[-1])))}; {len(records)} runs, {spent / 60:.0f} minutes",
        *(f"{what}: {value}" for what, value in facts(runs) if value != "not known"),
    ]


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    marks = [":---" if name in _WORDS else "---:" for name in rows[0]]
    cells = [list(rows[0]), marks, *(list(row.values()) for row in rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
