"""What was simulated, as a table, a CSV file and a figure. Its degree, simulated, stands in each of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.errors import UserError
from poseidon.reporting import gain
from poseidon.reporting.tables import write_csv
from poseidon.simulation import PARTS, Outcome, cells_to_emulate
from poseidon.tracking.folder import write_text

DEGREE = "simulated"
#: Parts of a node in words; what limits can be any of them, or latency.
WORDS = {
    "device": "the device",
    "link": "the link",
    "copy_out": "copies to the host",
    "copy_in": "copies to the device",
    "server_sum": "the host's sums",
    "latency": "latency",
}


@dataclass(frozen=True)
class Cell:
    """One simulated cluster.

    Attributes:
        system: the choice of comm, as the user wrote it.
        comm: what it is made of: ps, hybrid, ddp ...
        link: the rate in words.
        rate: bits/s.
        batch_size: rows per node and iteration.
        linear_rows: K, the rows that most of the linear layers' parameters see; None: there are none.
        least_bytes: that a node would send if each linear layer went by the cheapest of ps, sfb and block.
    """

    system: str
    comm: str
    link: str
    rate: float
    outcome: Outcome
    batch_size: int
    linear_rows: int | None
    least_bytes: float


@dataclass(frozen=True)
class Simulation:
    """All cells of one command.

    Attributes:
        basis: where the layers' times come from, in words.
        batch_sizes: rows per node and iteration, ascending.
        single: for each, seconds of one machine that communicates with nobody.
        overrides: that the command was given.
        folder: for the files.
    """

    model: str
    hardware: str
    basis: str
    batch_sizes: Sequence[int]
    single: Sequence[float]
    cells: Sequence[Cell]
    overrides: Sequence[str]
    folder: Path

    @property
    def title(self) -> str:
        rows = " to ".join(dict.fromkeys(map(str, (self.batch_sizes[0], self.batch_sizes[-1]))))
        return f"{self.model}, {rows} rows per node, {self.hardware}"


def render(simulation: Simulation) -> str:
    """A table for the terminal, where its times come from, and, of several cells, what to emulate."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False)
    compared = any(best_ddp(simulation, cell) for cell in simulation.cells)
    table = Table(title=f"{simulation.title}: {DEGREE}", title_justify="left")
    for heading in ("link", "comm"):
        table.add_column(heading)
    several = len(simulation.batch_sizes) > 1
    headings = (
        *["rows"] * several,
        "nodes",
        "s/iteration",
        *["x ddp"] * compared,
        "speedup",
        "bound, s",
        "MB sent",
        "device",
        "link",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("what limits")
    before = (simulation.cells[0].batch_size, simulation.cells[0].link)
    for cell in simulation.cells:
        if (cell.batch_size, cell.link) != before:
            table.add_section()
            before = (cell.batch_size, cell.link)
        found, times = cell.outcome, ratio(simulation, cell)
        table.add_row(
            cell.link,
            cell.system,
            *([str(cell.batch_size)] if several else []),
            str(found.nodes),
            f"{found.seconds:.4g}",
            *["-" if times is None else f"{times:.3f}"] * compared,
            f"{found.speedup:.2f}",
            f"{found.bound:.4g}",
            f"{found.bytes_sent / 1e6:.4g}",
            *(f"{found.busy[part] / found.seconds:.0%}" for part in ("device", "link")),
            WORDS[found.limit],
        )
    console.print(table)
    for line in _notes(simulation, compared):
        console.print(line, markup=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _notes(simulation: Simulation, compared: bool) -> list[str]:
    lines = [
        f"one machine: {', '.join(f'{seconds:.4g}' for seconds in simulation.single)} s; {simulation.basis}",
        "bound: what the busiest part takes, whatever the order. device, link: share of the iteration that they work.",
        *["x ddp: seconds of the fastest DDP on as many nodes and such links over these."] * compared,
        "Software takes no time here; docs/simulation.md says what else is not modelled.",
    ]
    systems = list(dict.fromkeys(cell.system for cell in simulation.cells))
    if len(simulation.batch_sizes) > 1:
        return lines + gain.words(simulation.cells)
    if len(systems) < 2:
        return lines
    choices = cells_to_emulate({(c.outcome.nodes, c.rate, c.system): c.outcome for c in simulation.cells})
    if choices:
        lines.append("Most worth an emulated run:")
    links = {cell.rate: cell.link for cell in simulation.cells}
    emulated = ",".join(["single", *(system for system in systems if "+" not in system and system != "single")])
    what = " ".join(_training(simulation.overrides))
    for choice in choices:
        command = f"{what} cluster.bandwidth={links[choice.rate]} cluster.nodes={choice.nodes} comm={emulated}"
        lines.append(f"  {links[choice.rate]}, {choice.nodes} nodes: {choice.why}")
        lines.append(f"    poseidon train -m {command}")
    return lines


def _training(overrides: Sequence[str]) -> list[str]:
    """Those that a training is given for the same model and cluster, but for what is swept."""
    swept = ("simulate.", "cluster.nodes=", "cluster.bandwidth=", "comm=")
    kept = [override for override in overrides if not override.startswith(swept)]
    chosen = {override.partition("=")[0] for override in kept}
    defaults = () if "experiment" in chosen else (("cluster", "emulated"), ("dataset", "synthetic"))
    return [*kept, *(f"{group}={choice}" for group, choice in defaults if group not in chosen)]


def rows(simulation: Simulation) -> list[dict[str, Any]]:
    """The tidy data: a row per cell."""
    return [
        {
            "degree": DEGREE,
            "model": simulation.model,
            "hardware": simulation.hardware,
            "rows_per_node": cell.batch_size,
            "linear_rows": cell.linear_rows,
            "system": cell.system,
            "comm": cell.comm,
            "link": cell.link,
            "bits_per_second": cell.rate,
            "nodes": cell.outcome.nodes,
            "iteration_seconds": cell.outcome.seconds,
            "single_seconds": cell.outcome.single,
            "speedup": cell.outcome.speedup,
            "ratio": ratio(simulation, cell),
            "bound_seconds": cell.outcome.bound,
            "limit": cell.outcome.limit,
            "bytes_sent_per_iteration": cell.outcome.bytes_sent,
            "least_bytes": cell.least_bytes,
            **{f"{part}_seconds": cell.outcome.busy[part] for part in PARTS},
        }
        for cell in simulation.cells
    ]


def best_ddp(simulation: Simulation, cell: Cell) -> Cell | None:
    """Of as many rows, nodes and the same links the fastest of DDP's variants; None if there is none, or the cell is
    one."""
    place = (cell.rate, cell.batch_size, cell.outcome.nodes)
    rivals = [
        other
        for other in simulation.cells
        if other.comm == "ddp" and (other.rate, other.batch_size, other.outcome.nodes) == place
    ]
    return min(rivals, key=lambda rival: rival.outcome.seconds) if rivals and cell.comm != "ddp" else None


def ratio(simulation: Simulation, cell: Cell) -> float | None:
    """So many times as fast as the best DDP, if there is any to compare with."""
    rival = best_ddp(simulation, cell)
    return rival.outcome.seconds / cell.outcome.seconds if rival is not None else None


def write(simulation: Simulation) -> list[Path]:
    """``table.csv``, and, if there is more than one number of nodes, ``speedup.png`` and ``.svg``, or, of several
    numbers of rows, ``gain.png`` and ``.svg``; gives the files.

    Raises:
        UserError: they cannot be written.
    """
    from poseidon.reporting.figures import gains, simulated
    from poseidon.reporting.figures.canvas import save, style

    folder = simulation.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "table.csv"
        write_text(table, write_csv(rows(simulation)))
        with style():
            several = len(simulation.batch_sizes) > 1
            figure = gains.draw(simulation) if several else simulated.draw(simulation)
            drawn = save(figure, folder / ("gain" if several else "speedup")) if figure is not None else []
    except OSError as error:
        raise UserError(
            f"simulate.folder={folder}: cannot write {error.filename or folder}: {error.strerror}"
        ) from error
    return [table, *drawn]
