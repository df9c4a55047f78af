"""``poseidon report``: from an experiment's runs to a folder with a page, figures and their data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.config.schema import ReportConfig
from poseidon.errors import UserError
from poseidon.reporting import curves, parts, provenance, published, tables
from poseidon.reporting.advice import baseline_command, more_nodes_command, train_command
from poseidon.reporting.page import GENERATOR, Page, Part, Picture, render
from poseidon.reporting.published import Curve, Published
from poseidon.reporting.runs import COMPLETED, Run
from poseidon.reporting.sections import Section, sections
from poseidon.reporting.store import Reader
from poseidon.tracking.folder import write_text
from poseidon.tracking.where import shown

if TYPE_CHECKING:
    from rich.console import Console

_NO_BASELINE = "No speedup can be told: there is no run of comm=single with {rows} rows on such a host."
_TOO_SHORT = (
    "No speedup can be told: the runs of comm=single made one iteration or none, and so have no speed. More of "
)
_TOO_SHORT += "trainer.epochs or trainer.iterations helps."


def make_report(config: ReportConfig, console: Console | None = None) -> Path:
    """Writes the report of ``report.experiment`` and gives the absolute path of its index.html.

    The folder ``report.folder/report.name`` gets ``index.html``, ``figures/*.png`` and ``*.svg``, and ``data/*.csv``.
    The same runs give the same bytes.

    Args:
        console: gets the tables and what is missing; None: nothing is printed.

    Raises:
        UserError: there is no such experiment, no completed run in it, or the folder is something else's.
    """
    store = Reader(config.tracking.uri)
    experiment = config.report.experiment
    if not experiment:
        raise UserError(f"report.experiment has no value: give one, report.experiment=...; {_there_is(store)}")
    runs = store.runs(experiment)
    found = sections(runs)
    if not found:
        raise UserError(_nothing(experiment, runs, store))
    folder = _folder(config)
    with _style():
        made = [_part(section, experiment, config, folder) for section in found]
    if any(part.emulated for part in made):
        for part in made:
            part.emulated = part.emulated or ["none"]
    _write_tables(found, runs, folder)
    index = folder / "index.html"
    write_text(index, render(_page(experiment, runs, found, made)))
    if console is not None:
        _print(console, made, provenance.warnings(found))
        others = len(runs) - sum(run.status == COMPLETED for run in runs)
        if others:
            console.print(
                f"not averaged in: {others} run{'s' if others > 1 else ''} that did not complete (see the page)"
            )
    return index.absolute()


def _page(experiment: str, runs: Sequence[Run], found: Sequence[Section], made: Sequence[Part]) -> Page:
    done = [run for run in runs if run.status == COMPLETED]
    others = len(runs) - len(done)
    counts = f"{len(done)} completed run{'s' if len(done) != 1 else ''}"
    return Page(
        title=f"Report: {experiment}",
        experiment=experiment,
        counts=f"{counts}, {others} not averaged in" if others else counts,
        parts=made,
        warnings=provenance.warnings(found),
        facts=provenance.facts(done),
        differences=provenance.config_differences(done),
        failures=provenance.failures(runs),
        runs=[_run_row(row) for row in tables.run_rows(runs)],
    )


def _part(section: Section, experiment: str, config: ReportConfig, folder: Path) -> Part:
    """Draws a section's figures and tells what it lacks."""
    part = Part(
        title=section.title,
        anchor=section.slug,
        facts=section.facts,
        notes=provenance.baselines(section),
        rows=[tables.shown(row) for row in tables.summary_rows([section])],
    )
    known = published.load()
    theirs = _theirs(known, section)
    if section.emulated:
        parts.emulation(part, section, experiment, config.tracking.uri, folder)
        theirs = parts.published(part, section, theirs, known, folder)
    part.published = [f"{paper}: {known.papers[paper]}" for paper in dict.fromkeys(c.paper for c in theirs)]
    _speedup(part, section, theirs, experiment, config, folder)
    _training(part, section, folder)
    from poseidon.reporting.figures import traffic

    caption = "Values sent per node and iteration, by scheme; the line is what the plan said. Medians over the repeats."
    part.traffic = _picture(traffic.draw(section), folder, f"{section.slug}-bytes", traffic.rows(section), caption)
    return part


def _theirs(known: Published, section: Section) -> list[Curve]:
    classes = section.first.params.get("dataset.num_classes") or section.first.params.get("model.num_classes") or ""
    return known.of(section.first.text("model"), section.batch_size, int(classes) if classes.isdigit() else None)


def _speedup(
    part: Part, section: Section, theirs: Sequence[Curve], experiment: str, config: ReportConfig, folder: Path
) -> None:
    from poseidon.reporting.figures import speedup

    uri = config.tracking.uri
    if all(configuration.comm == "single" for configuration in section.configurations):
        part.missing = "There is only comm=single so far, and nothing to compare it with. This makes some:"
        part.command = more_nodes_command(section, experiment, uri)
        return
    if not part.notes:
        part.missing = (
            _TOO_SHORT if section.singles else _NO_BASELINE.format(rows=section.batch_size)
        ) + " This makes the baseline:"
        part.command = baseline_command(section, experiment, uri)
        return
    caption = "Images/s over one machine's, against worker nodes. Hollow: oversubscribed."
    if any(configuration.bounds for configuration in section.configurations):
        caption += " Crossed: this machine's cores were the limit. Ringed: the engine would be it at f = 1."
    figure = speedup.draw(section, theirs)
    part.speedup = _picture(figure, folder, f"{section.slug}-speedup", speedup.rows(section, theirs), caption)
    if part.speedup is None:
        part.missing = "No run made enough iterations to have a speed."


def _training(part: Part, section: Section, folder: Path) -> None:
    from poseidon.reporting.figures import training

    metric = section.metric
    wanted = [("train/loss", "training loss", "loss", False)]
    if section.throughput_only:
        part.words.append("The data set is for throughput only: accuracy says nothing, and is not drawn.")
    else:
        wanted.append(("eval/accuracy", f"evaluation {metric}", "accuracy", tables.is_share(metric)))
    for source, name, file, percent in wanted:
        figure = training.draw(section, source, name, percent=percent)
        column = source.replace("/", "_")
        caption = f"{name.capitalize()} against iterations and seconds: medians over the repeats."
        if any(run.comm == "single" for run in section.runs):
            caption += " One process is drawn beside each number of nodes, and may go on beyond the edge."
        rows = curves.rows(section, source, column)
        picture = _picture(figure, folder, f"{section.slug}-{file}", rows, caption)
        if picture:
            part.training.append(picture)
        else:
            part.words.append(f"No run has recorded its {name}.")


def _picture(figure: Any, folder: Path, stem: str, rows: Sequence[dict[str, Any]], caption: str) -> Picture | None:
    """Files of a figure and of its data; None if there is no figure."""
    if figure is None:
        return None
    from poseidon.reporting.figures.canvas import save

    _, svg = save(figure, folder / "figures" / stem)
    write_text(folder / "data" / f"{stem}.csv", tables.write_csv(rows))
    return Picture.of(svg, caption, wide=figure.get_figwidth() > 8)


def _write_tables(found: Sequence[Section], runs: Sequence[Run], folder: Path) -> None:
    write_text(folder / "data" / "summary.csv", tables.write_csv(tables.summary_rows(found)))
    write_text(folder / "data" / "runs.csv", tables.write_csv(tables.run_rows(runs)))


def _run_row(row: dict[str, Any]) -> dict[str, str]:
    names = ("run", "status", "model", "dataset", "comm", "nodes", "batch_size", "seed", "iterations", "started")
    speed, share = row["images_per_second"], row["eval_accuracy"]
    cells = {name: tables.DASH if row[name] is None else str(row[name]) for name in names}
    cells["started"] = cells["started"].partition("+")[0].replace("T", " ")
    cells["iterations"] = tables.text(row["iterations"], "{:.0f}")
    cells |= {"images/s": tables.text(speed, tables.speed_form(speed)), "accuracy": tables.text(share, "{:.4g}")}
    if "time_dilation" in row:
        words = {name: str(row[name] or tables.DASH) for name in ("hardware", "link", "limits")}
        cells |= {**words, "f": tables.text(row["time_dilation"], "{:g}")}
    return cells


def _folder(config: ReportConfig) -> Path:
    """The report's folder, with no figure of an earlier one in it."""
    options = config.report
    name = options.name or re.sub(r"[^\w.-]+", "-", str(options.experiment)).strip(".-") or "report"
    if Path(name).name != name or name in (".", ".."):
        raise UserError(f"report.name={name}: must be the name of a folder; report.folder says where it is")
    folder = Path(options.folder).expanduser() / name
    index = folder / "index.html"
    try:
        ours = index.is_file() and GENERATOR in index.read_text(encoding="utf-8", errors="replace")
        if not ours and folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"report.name={name}: {folder} is not empty and holds no report; choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(index, f"{GENERATOR}\nThis report is being written, or its writing was cut short.\n")
        for kind, suffixes in (("figures", (".png", ".svg")), ("data", (".csv",))):
            (folder / kind).mkdir(exist_ok=True)
            for file in sorted((folder / kind).iterdir()):
                if file.suffix in suffixes:
                    file.unlink()
    except OSError as error:
        raise UserError(f"report.folder={options.folder}: cannot write {folder}: {error.strerror}") from error
    return folder


def _nothing(experiment: str, runs: Sequence[Run], store: Reader) -> str:
    make = train_command([], experiment)
    if not runs:
        return f"report.experiment={experiment}: no such experiment; {_there_is(store)}; `{make}` makes one"
    counts = {status: sum(run.status == status for run in runs) for status in sorted({run.status for run in runs})}
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"report.experiment={experiment}: has no completed run ({words}); {_there_is(store)}; `{make}` makes one"


def _there_is(store: Reader) -> str:
    names = store.experiments()
    return f"{shown(store.uri)} has {', '.join(names)}" if names else f"{shown(store.uri)} has no runs of poseidon"


def _style() -> Any:
    from poseidon.reporting.figures.canvas import style

    return style()


def _print(console: Console, made: Sequence[Part], warnings: Sequence[str]) -> None:
    from rich.table import Table

    for part in made:
        names = ["comm", "nodes", "repeats", "images/s", "speedup", "MB sent", "accuracy"]
        if part.dilation:  # there is no accuracy, and one f
            names = ["comm", "nodes", "images/s", "speedup", "MB sent", "limit"]
        table = Table(title=part.title, title_justify="left")
        for name in names:
            table.add_column(name, justify="left" if name == "comm" else "right")
        for row in part.rows:
            table.add_row(*(row[name].partition(" [")[0] for name in names))
        console.print(table)
        advice = [(part.missing, part.command)] if part.command else []
        for line in (line for pair in advice + (part.dilation.advice if part.dilation else []) for line in pair):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for warning in warnings:
        console.print(warning, markup=False, highlight=False, soft_wrap=True)
