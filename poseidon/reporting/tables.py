"""Rows of the report's tables, as data for CSV files and as text for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from poseidon.reporting.bounds import PARTS
from poseidon.reporting.emulated import hardware, link
from poseidon.reporting.runs import COMPLETED, Run, Stat, stat
from poseidon.reporting.sections import Configuration, Section

DASH = "\N{EN DASH}"


def summary_rows(sections: Iterable[Section]) -> list[dict[str, Any]]:
    """A row per configuration: medians over its repeats."""
    return [_summary(section, configuration) for section in sections for configuration in section.configurations]


def _summary(section: Section, configuration: Configuration) -> dict[str, Any]:
    runs, speed, speedup = configuration.runs, configuration.speed, section.speedup(configuration)
    return {
        "setting": section.title,
        "curve": configuration.variant,
        "comm": configuration.comm,
        "nodes": configuration.nodes,
        "rows_per_iteration": configuration.rows,
        "repeats": len(runs),
        **_spread("images_per_second", speed),
        **_spread("speedup", speedup),
        "iteration_seconds": _median(run.iteration_seconds for run in runs),
        "stall_share": _median(run.stall_share for run in runs),
        "bytes_sent_per_iteration": _median(run.bytes_sent for run in runs),
        "bytes_dense_per_iteration": _median(run.bytes_dense for run in runs),
        "bytes_source": "computed" if any(run.computed for run in runs) else "counted",
        "metric": section.metric,
        "eval_accuracy": None if section.throughput_only else _median(run.value("eval_accuracy") for run in runs),
        "train_loss": _median(run.value("train_loss") for run in runs),
        "oversubscribed": configuration.oversubscribed,
        "degree": section.facts["degree"],
        "status": COMPLETED,
        **(_emulated(section, configuration) if section.emulated else {}),
    }


def _emulated(section: Section, configuration: Configuration) -> dict[str, Any]:
    runs = configuration.runs
    limit = _median(run.value("engine_limit_bits_per_second") for run in runs)
    return {
        "hardware": section.facts["hardware"],
        "link": section.facts.get("link"),
        "time_dilation": configuration.dilation,
        "cpu_bound": "CPU" in configuration.bounds,
        "engine_bound": "engine" in configuration.bounds,
        "engine_limit_gbit_per_second": None if limit is None else limit / 1e9,
        "cores_per_node": _median(run.value("cores_per_node") for run in runs),
        "emulated_costs": " + ".join(dict.fromkeys(cost for run in runs for cost in run.emulated_costs)),
    }


def run_rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """A row per run, whatever became of it. If any is emulated, all say on what."""
    runs = list(runs)
    emulated = any(run.emulated for run in runs)
    return [
        {
            "run": run.name,
            "run_id": run.run_id,
            "status": run.status,
            **{key: run.summary.get(key) for key in ("model", "dataset", "comm", "nodes", "batch_size", "seed")},
            "images_per_second": run.speed,
            "eval_accuracy": None if run.throughput_only else run.value("eval_accuracy"),
            "train_loss": run.value("train_loss"),
            "iterations": run.value("iterations"),
            "host": run.host.get("name"),
            "git_commit": run.summary.get("git_commit"),
            "git_dirty": run.summary.get("git_dirty"),
            "started": run.summary.get("started"),
            "error": run.error,
            **(_where(run) if emulated else {}),
        }
        for run in runs
    ]


def _where(run: Run) -> dict[str, Any]:
    return {
        "degree": run.summary.get("degree"),
        "hardware": hardware(run) if run.emulated else None,
        "link": link(run) if run.comm != "single" else None,
        "time_dilation": run.dilation if run.emulated else None,
        "limits": ", ".join(run.bounds),
    }


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of :func:`summary_rows` as people read it."""
    alone = row["nodes"] == 1
    star = "*" if row["bytes_source"] == "computed" and not alone else ""
    asleep = "layers" in row.get("emulated_costs", "")  # then nothing is learnt
    learnt = {
        "accuracy": text(row["eval_accuracy"], "{:.2%}" if is_share(row["metric"]) else "{:.4g}"),
        "loss": text(row["train_loss"], "{:.4g}"),
    }
    return {
        "comm": str(row["curve"]) + (" °" if row["oversubscribed"] else ""),
        "nodes": str(row["nodes"]),
        "repeats": str(row["repeats"]),
        "images/s": _range(row, "images_per_second", speed_form(row["images_per_second"])),
        "speedup": _range(row, "speedup", "{:.2f}"),
        "ms/iteration": text(row["iteration_seconds"], "{:.1f}", 1e3),
        "stall": DASH if alone else text(row["stall_share"], "{:.0%}"),
        "MB sent": DASH if alone else text(row["bytes_sent_per_iteration"], "{:.3f}", 1e-6) + star,
        **({} if asleep else learnt),
        **(_shown_emulated(row) if "time_dilation" in row else {}),
        "degree": str(row["degree"]),
        "status": str(row["status"]),
    }


def _shown_emulated(row: Mapping[str, Any]) -> dict[str, str]:
    limits = [word for word, key in (("CPU", "cpu_bound"), ("engine", "engine_bound")) if row[key]]
    return {
        "f": f"{row['time_dilation']:g}",
        "limit": ", ".join(limits) or DASH,
        "engine fills, Gbit/s": text(row["engine_limit_gbit_per_second"], "{:.3g}"),
        "cores/node at f=1": text(row["cores_per_node"], "{:.2f}"),
    }


def shown_dilation(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of :func:`poseidon.reporting.dilation.rows` as people read it; all in seconds."""
    difference, within = row["difference"], row["within_bar"]
    return {
        "cell": str(row["curve"]),
        "nodes": str(row["nodes"]),
        "f": f"{row['f']:g}",
        "T(f)": text(row["seconds_at_f"], "{:.4f}"),
        "T(2f)": text(row["seconds_at_2f"], "{:.4f}"),
        "A": text(row["dilated_seconds"], "{:.4f}"),
        "B": text(row["software_seconds"], "{:.4f}"),
        "A + B/f": text(row["seconds_at_f"], "{:.4f}"),
        "A + B": text(row["undilated_seconds"], "{:.4f}"),
        "T(1)": text(row["seconds_at_1"], "{:.4f}"),
        "T(1) from A + B": text(difference, "{:+.1%}"),
        "within 5 %": DASH if within is None else "yes" if within else "no",
        "limit": row["limits"] or DASH,
    }


def shown_bounds(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of :func:`poseidon.reporting.bounds.rows` as people read it; all in seconds."""
    return {
        "cell": str(row["curve"]),
        "nodes": str(row["nodes"]),
        "iteration": text(row["seconds"], "{:.3f}"),
        **{word: text(row[f"{part}_seconds"], "{:.3f}") for part, word in PARTS.items()},
        "busiest": PARTS[row["busiest"]],
        "iteration/busiest": text(row["over_busiest"], "{:.3f}"),
    }


def shown_seconds(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of :func:`poseidon.reporting.seconds.rows` as people read it."""
    return {
        "published": row["published"],
        "here": row["curve"],
        "nodes": str(row["nodes"]),
        "here, s": _range(row, "seconds", "{:.3f}"),
        "published, s": f"{row['published_seconds']:.3f} ({row['source']})",
        "here/published": f"{row['ratio']:.3f}",
        "limit": row["limits"] or DASH,
        "no test, as": row["no_test"] or DASH,
    }


def is_share(metric: str) -> bool:
    """Whether a metric is a fraction, which people read in percent."""
    return metric.endswith("accuracy")


def speed_form(speed: float | None) -> str:
    """How speeds of this size are written."""
    digits = 0 if speed is None or speed >= 100 else 1 if speed >= 10 else 2
    return f"{{:,.{digits}f}}"


def text(value: Any, form: str, scale: float = 1.0) -> str:
    return DASH if value is None else form.format(value * scale)


def write_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """With floats in one form, and nothing for what is not known."""
    file = io.StringIO()
    names = list(columns or dict.fromkeys(key for row in rows for key in row))
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    return file.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _range(row: Mapping[str, Any], key: str, form: str) -> str:
    middle, low, high = (row[name] for name in (key, f"{key}_min", f"{key}_max"))
    if middle is None:
        return DASH
    spread = f" [{form.format(low)}..{form.format(high)}]" if row["repeats"] > 1 else ""
    return form.format(middle) + spread


def _spread(key: str, found: Stat | None) -> dict[str, float | None]:
    if found is None:
        return {key: None, f"{key}_min": None, f"{key}_max": None}
    return {key: found.median, f"{key}_min": found.low, f"{key}_max": found.high}


def _median(values: Iterable[float | None]) -> float | None:
    found = stat(values)
    return found.median if found else None
