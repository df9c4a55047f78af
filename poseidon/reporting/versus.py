"""Several experiments simulated: every cell beside the fastest DDP, the smallest lead first, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon.errors import UserError
from poseidon.reporting.simulated import DEGREE, WORDS, Cell, Simulation, best_ddp, ratio, rows
from poseidon.reporting.tables import write_csv
from poseidon.tracking.folder import write_text

#: Of cells with the smallest lead, so many are worth an emulated run.
_SMALLEST = 12

Simulations = Mapping[str, Simulation]  # by experiment
Duel = tuple[float, str, Cell, Cell]  # ratio, experiment, ours, the fastest DDP


def duels(simulations: Simulations) -> list[Duel]:
    """The smallest ratio first."""
    found = []
    for experiment, simulation in simulations.items():
        for cell in simulation.cells:
            rival, times = best_ddp(simulation, cell), ratio(simulation, cell)
            if rival is not None and times is not None and cell.outcome.nodes > 1:
                found.append((times, experiment, cell, rival))
    return sorted(found, key=lambda duel: duel[:2])


def write(simulations: Simulations, overrides: Sequence[str], folder: Path) -> list[Path]:
    """``table.csv`` with all cells, and ``table.md`` with those that are beside a DDP; gives the files.

    Args:
        overrides: of the command.

    Raises:
        UserError: they cannot be written.
    """
    table: list[dict[str, Any]] = [
        {"experiment": experiment, **row} for experiment, each in simulations.items() for row in rows(each)
    ]
    files = {
        folder / "table.csv": write_csv(table),
        folder / "table.md": "\n".join(_page(duels(simulations), overrides)) + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            write_text(path, text)
    except OSError as error:
        raise UserError(
            f"simulate.folder={folder}: cannot write {error.filename or folder}: {error.strerror}"
        ) from error
    return list(files)


def _page(found: Sequence[Duel], overrides: Sequence[str]) -> Iterator[str]:
    below = sum(times < 1 for times, *_ in found)
    yield f"# Beside the fastest DDP: {DEGREE}"
    yield ""
    yield f"    poseidon simulate {' '.join(overrides)}"
    yield ""
    yield f"Ratio: seconds of the fastest DDP over ours. {len(found)} cells, {below} below 1, the smallest lead first."
    yield "Software takes no time here; docs/simulation.md says what else is not modelled."
    yield ""
    yield "| experiment | link | nodes | comm | s/iteration | fastest DDP | its seconds | ratio | what limits ours |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for times, experiment, cell, rival in found:
        ours, theirs = cell.outcome, rival.outcome
        yield (
            f"| {experiment} | {cell.link} | {ours.nodes} | {cell.system} | {ours.seconds:.4g} | {rival.system} | "
            f"{theirs.seconds:.4g} | {times:.4f} | {WORDS[ours.limit]} |"
        )
    yield ""
    yield from smallest(found)


def smallest(found: Sequence[Duel]) -> Iterator[str]:
    """The commands of emulated runs."""
    yield f"The {min(_SMALLEST, len(found))} smallest leads, emulated:"
    yield ""
    for _, experiment, cell, rival in found[:_SMALLEST]:
        bucket = rival.system.partition("+")[2].removesuffix("mib")
        said = [
            f"experiment={experiment} cluster.bandwidth={cell.link} cluster.nodes={cell.outcome.nodes}",
            f"comm={cell.system.partition('+')[0]},ddp",
            *["comm.overlap=full"] * cell.system.endswith("+full"),
            *[f"comm.ddp.bucket_cap_mb={bucket}"] * bool(bucket),
            "cluster.time_dilation=auto",
        ]
        yield f"    poseidon train -m {' '.join(said)}"
