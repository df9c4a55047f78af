"""The picture of a single run, from its own folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poseidon.reporting.runs import number


def run_figures(run_dir: Path) -> list[Path]:
    """Draws ``figures/training.png``: loss and accuracy against iterations and seconds.

    Args:
        run_dir: of a run that has ended, with metrics.jsonl and summary.json.

    Returns:
        The files; none if there is nothing to draw, or it cannot be drawn: a run's records are worth more than its
        picture, so nothing is raised.
    """
    try:
        return _draw(run_dir)
    except Exception:
        return []


def _draw(run_dir: Path) -> list[Path]:
    metrics, summary = _metrics(run_dir / "metrics.jsonl"), _object(run_dir / "summary.json")
    throughput_only = bool(summary.get("throughput_only"))
    found = [("training loss", 1.0, _points(metrics, "train_loss"))]
    if not throughput_only:
        evaluated = _points(metrics, "eval_accuracy")
        share = all(0 <= point[2] <= 1 for point in evaluated)  # else another metric than the accuracy
        found.append(("evaluation accuracy, %", 100.0, evaluated) if share else ("evaluation metric", 1.0, evaluated))
    found = [(name, scale, points) for name, scale, points in found if points]
    if not found:
        return []
    from poseidon.reporting.figures.canvas import head, looks, new_figure, save, style

    comm = str(summary.get("comm") or "?")
    with style():
        figure = new_figure(6.4, 0.8 + 2.3 * len(found))
        grid = figure.subplots(len(found), 2, sharey="row", squeeze=False)
        look = looks([(comm, comm)])[comm]
        for row, (name, scale, points) in zip(grid, found, strict=True):
            for axes, axis in zip(row, (0, 1), strict=True):
                marker = look.marker if len(points) <= 30 else ""
                x, y = [point[axis] for point in points], [scale * point[2] for point in points]
                axes.plot(x, y, color=look.color, marker=marker, ms=5)
                axes.set_xlim(left=0)
                axes.set_xlabel("seconds since the first iteration" if axis else "iteration")
            row[0].set_ylabel(name)
        head(figure, *_words(summary, comm))
        (run_dir / "figures").mkdir(exist_ok=True)
        return save(figure, run_dir / "figures" / "training", (".png",))


def _words(summary: dict[str, Any], comm: str) -> tuple[str, str]:
    nodes, host = summary.get("nodes"), summary.get("host")
    cpu = host.get("cpu") if isinstance(host, dict) else None
    title = f"{summary.get('model')} on {summary.get('dataset')}, {comm}, {nodes} node{'' if nodes == 1 else 's'}"
    known = (summary.get("degree"), cpu, f"seed {summary.get('seed')}", summary.get("status"))
    return title, ", ".join(str(word) for word in known if word is not None)


def _points(metrics: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float, float]]:
    """(iteration, seconds, value) of the lines that have all three."""
    found = []
    for line in metrics:
        values = [number(line.get(name)) for name in ("iteration", "wall_s", key)]
        if None not in values:
            found.append(tuple(values))
    return found  # type: ignore[return-value]


def _metrics(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in map(_parsed, lines) if line]


def _object(path: Path) -> dict[str, Any]:
    return _parsed(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
