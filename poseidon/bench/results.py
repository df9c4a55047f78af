"""What the records of a suite come to: a row per bar, and a row per variant."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.bench.figures import FIGURES
from poseidon.bench.records import CHOICE, Record, Store
from poseidon.bench.statistics import Estimate, estimate
from poseidon.bench.suite import Bar, Case

#: Round -> record.
Rounds = Mapping[int, Record]


@dataclass(frozen=True)
class CaseResult:
    """What is known of a case so far.

    Attributes:
        rounds: of each variant, its completed runs.
        chosen: of variants with alternatives, what the chosen one has that the others have not.
        notes: what a reader has to know: failures, and why it was left out.
    """

    case: Case
    rounds: Mapping[str, Rounds] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def name(self, variant: str) -> str:
        """Of a variant, with what was chosen for it."""
        return f"{variant} ({self.chosen[variant]})" if variant in self.chosen else variant


def collect(
    store: Store, case: Case, digests: Mapping[str, str] | None = None, notes: Sequence[str] = ()
) -> CaseResult:
    """What the records say of a case.

    Args:
        digests: of the variants, as far as they could be run; None: each variant's newest.
    """
    if digests is None:
        known = {variant: store.newest(case.name, variant) for variant in case.variants}
        digests = {variant: digest for variant, digest in known.items() if digest is not None}
    found = {variant: store.completed(case.name, digest) for variant, digest in digests.items()}
    rounds = {variant: {n: r for n, r in its.items() if n != CHOICE} for variant, its in found.items()}
    chosen = {variant: record.chosen.get(variant, "") for variant, its in rounds.items() for record in its.values()}
    return CaseResult(case, rounds, {variant: words for variant, words in chosen.items() if words}, notes)


def bar_rows(result: CaseResult) -> list[dict[str, Any]]:
    """The tidy data of the table of bars."""
    return [_bar_row(result, bar) for bar in result.case.bars]


def _bar_row(result: CaseResult, bar: Bar) -> dict[str, Any]:
    found = ratio(result, bar)
    figure = FIGURES[bar.figure]
    return {
        "case": result.case.name,
        "what": result.case.what,
        "variant": result.name(bar.variant),
        "figure": bar.figure,
        "over": result.name(bar.over) if bar.over else None,
        "words": figure.words.format(over=result.name(bar.over) if bar.over else ""),
        "median": found.median if found else None,
        "low": found.low if found else None,
        "high": found.high if found else None,
        "pairs": found.count if found else 0,
        "at_least": bar.at_least,
        "at_most": bar.at_most,
        "ideal": bar.ideal,
        "verdict": verdict(bar, found),
        "lead": found.lead if found and figure.lead else None,
    }


def ratio(result: CaseResult, bar: Bar) -> Estimate | None:
    """Of the rounds in which both variants have run."""
    mine, other = result.rounds.get(bar.variant, {}), result.rounds.get(bar.over or bar.variant, {})
    value = FIGURES[bar.figure].value
    found = [value(mine[n], other[n]) for n in sorted(mine.keys() & other.keys())]
    return estimate([one for one in found if one is not None])


def verdict(bar: Bar, found: Estimate | None) -> str:
    """``reached`` or ``missed`` by the median; ``open`` if it misses a bar that lies within the interval; ``not
    measured``; "" without a bar."""
    if bar.at_least is None and bar.at_most is None:
        return ""
    if found is None:
        return "not measured"
    least = bar.at_least if bar.at_least is not None else float("-inf")
    most = bar.at_most if bar.at_most is not None else float("inf")
    if least <= found.median <= most:
        return "reached"
    return "open" if found.count > 1 and found.high >= least and found.low <= most else "missed"


def variant_rows(result: CaseResult) -> list[dict[str, Any]]:
    """The tidy data of the table of variants: medians over a variant's runs."""
    return [_variant_row(result, variant, list(rounds.values())) for variant, rounds in result.rounds.items() if rounds]


def _variant_row(result: CaseResult, variant: str, records: Sequence[Record]) -> dict[str, Any]:
    def median(value: Callable[[Record], float | None]) -> float | None:
        known = [found for found in map(value, records) if found is not None]
        return statistics.median(known) if known else None

    newest = records[-1]
    seconds, bound, sent = median(lambda r: r.iteration), median(lambda r: r.bound), median(lambda r: r.sent)
    return {
        "case": result.case.name,
        "variant": result.name(variant),
        "comm": newest.summary.get("comm"),
        "nodes": newest.summary.get("nodes"),
        "runs": len(records),
        "iteration_seconds": seconds,
        "mean_seconds_with_drain": median(lambda r: r.of_iterations("mean")),
        "longest_seconds": median(lambda r: r.of_iterations("max")),
        "bound_seconds": bound,
        "over_bound": median(lambda r: r.iteration / r.bound if r.iteration and r.bound else None),
        "device_seconds": median(lambda r: r.busy.get("device")),
        "link_seconds": median(lambda r: r.busy.get("link")),
        "exposed_seconds": median(lambda r: r.value("stall_seconds")),
        "bytes_sent": sent,
        "bytes_source": newest.summary.get("bytes_source"),
        "gbit_per_second": 8e-9 * sent / seconds if sent and seconds else None,
        "gbit_per_thread_second": median(_thread_rate),
        "cpu_seconds": median(lambda r: r.value("cpu_seconds_per_iteration")),
        "cpu_seconds_per_gb": median(lambda r: FIGURES["cpu_per_gb"].value(r, r)),
        "busiest_thread_seconds": median(lambda r: r.thread),
        "cores_per_node": median(lambda r: r.value("cores_per_node")),
        "time_dilation": newest.value("time_dilation"),
        "emulated_hardware": newest.summary.get("hardware"),
        "cpu_bound": any(r.summary.get("cpu_bound") for r in records),
        "engine_bound": any(r.summary.get("engine_bound") for r in records),
        "oversubscribed": any(r.summary.get("oversubscribed") for r in records),
        "command": newest.command,
    }


def _thread_rate(record: Record) -> float | None:
    rate = record.value("engine_limit_bits_per_second")
    return rate / 1e9 if rate else None
