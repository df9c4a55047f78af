"""What the terminal shows at the end of a sweep: a row per job, and how to see more."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from poseidon.tracking.where import is_server, shown, store_uri


def table(summaries: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> Table:
    """A row per job; what was swept stands in front."""
    result = Table(caption="MB sent: per iteration and node; * computed, as PyTorch's DDP and FSDP do not count")
    swept = [dict(str(o).partition("=")[::2] for o in summary.get("overrides") or []) for summary in summaries]
    # comm=single has one node whatever cluster.nodes is.
    told = "cluster.nodes" in axes and [own.get("cluster.nodes") for own in swept] == [*map(_nodes, summaries)]
    columns = {name: cell for name, cell in _COLUMNS.items() if not (name == "nodes" and told)}
    for axis in axes:
        result.add_column(axis.lstrip("+"), overflow="fold")
    for name in columns:
        result.add_column(name, justify="left" if name == "status" else "right")
    for own, summary in zip(swept, summaries, strict=True):
        cells = [*(own.get(axis, "-") for axis in axes), *(cell(summary) for cell in columns.values())]
        result.add_row(*map(Text, cells))
    return result


def hints(uri: str, experiments: Sequence[str]) -> list[str]:
    """The commands that show more of what is in a store."""
    store = "" if uri == store_uri() else f" tracking.uri={shown(uri)}"
    return [
        *(f"poseidon report report.experiment={shlex.quote(name)}{store}" for name in experiments),
        f"poseidon ui{store}",
    ]


def look(uri: str, experiment_id: str | None, run_id: str | None) -> str:
    """How to see a run: its page on a server, else the command that starts one."""
    if not is_server(uri) or run_id is None:
        return hints(uri, [])[0]
    return f"{shown(uri).rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"


def _nodes(summary: Mapping[str, Any]) -> str:
    return str(summary.get("nodes"))


def _accuracy(summary: Mapping[str, Any]) -> str:
    value = summary.get("eval_accuracy")
    return "-" if value is None else f"{value:.2%}{' (meaningless)' if summary.get('throughput_only') else ''}"


def _speed(summary: Mapping[str, Any]) -> str:
    value = summary.get("images_per_second")
    return "-" if value is None else f"{value:,.0f}{' (oversubscribed)' if summary.get('oversubscribed') else ''}"


def _sent(summary: Mapping[str, Any]) -> str:
    sent = summary.get("bytes_sent_per_iteration") or []
    if len(sent) < 2:
        return "-"
    return f"{max(sent) / 1e6:.3f}{'*' if summary.get('bytes_source') == 'computed' else ''}"


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "nodes": _nodes,
    "accuracy": _accuracy,
    "images/s": _speed,
    "MB sent": _sent,
    "status": lambda summary: str(summary.get("status")),
}
