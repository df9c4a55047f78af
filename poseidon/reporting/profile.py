"""What `poseidon profile` prints: the layers that take most of an iteration, and the machine's rates."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from poseidon.config.paths import conf_dir

if TYPE_CHECKING:
    from poseidon.config.hardware import HardwareConfig, LayerTable

_SHOWN = 12  # layers
_RATES = {"memory_bandwidth": "memory of an optimizer step", "host_copy": "host copy", "server_sum": "host's sums"}


def render(profile: HardwareConfig, model: str, seconds: Sequence[float], flops: float, path: Path) -> str:
    """As text.

    Args:
        model: of the profile, the one that was measured now.
        seconds: of each iteration.
        flops: of one.
        path: where the profile is.
    """
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False)
    console.print(_table(profile.layers[model]))
    entry = profile.iterations[model]
    assert entry is not None
    for line in (
        f"{model}, {entry.batch_size} rows: {_time(entry.seconds)} per iteration, median of {len(seconds)} from "
        f"{_time(min(seconds))} to {_time(max(seconds))}; {flops / entry.seconds / 1e9:.3g} GFLOP/s",
        ", ".join(
            f"{word} {getattr(profile, key) / 1e9:.3g} GB/s" for key, word in _RATES.items() if getattr(profile, key)
        ),
        *_doubts(seconds),
        f"profile: {path}",
        f"use it: {usage(path, model)}",
    ):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def usage(path: Path, model: str) -> str:
    """A command that takes the profile."""
    if path.parent.name != "hardware":
        return f"put it into a folder hardware/ and name the folder around that: --config-dir DIR hardware={path.stem}"
    folder = path.parent.parent
    place = "" if folder == conf_dir() else f"--config-dir {_from_here(folder)} "
    return f"poseidon train {place}hardware={path.stem} model={model} dataset=synthetic"


def _table(table: LayerTable) -> Any:
    from rich.table import Table

    drawn = Table()
    for heading in ("layer", "forward", "backward", "share"):
        drawn.add_column(heading, justify="left" if heading == "layer" else "right")
    rows = [(path or "(model)", times.forward, times.backward) for path, times in table.seconds.items()]
    whole = sum(forward + backward for _, forward, backward in rows)
    least = sorted((forward + backward for _, forward, backward in rows), reverse=True)[:_SHOWN][-1]
    shown = [row for row in rows if row[1] + row[2] >= least][:_SHOWN]
    others = [row for row in rows if row not in shown]
    if others:
        shown.append((f"({len(others)} others)", sum(row[1] for row in others), sum(row[2] for row in others)))
    for path, forward, backward in shown:
        drawn.add_row(path, _time(forward), _time(backward), f"{(forward + backward) / whole:.1%}")
    return drawn


def _doubts(seconds: Sequence[float]) -> list[str]:
    """An idle machine's median lies within a few percent of its best."""
    if median(seconds) < 1.15 * min(seconds):
        return []
    return ["the iterations differ much: was the machine busy? Measure again when it is not"]


def _from_here(folder: Path) -> Path:
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
