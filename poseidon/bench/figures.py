"""What a bar can be about: a figure of one variant, or of one beside another, from the runs of one round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from poseidon.bench.records import Record

#: Of a variant's run and, where the figure has two variants, of the other's; None if it is not known.
Value = Callable[[Record, Record], float | None]


@dataclass(frozen=True)
class Figure:
    """One kind of figure.

    Attributes:
        words: what it is, for people; ``{over}`` is the other variant.
        relative: whether it has two variants.
        lead: whether it is a quotient of speeds, of which some are too close to 1 to be called a lead.
    """

    words: str
    value: Value
    relative: bool = False
    lead: bool = False


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _cpu(record: Record) -> float | None:
    return record.value("cpu_seconds_per_iteration")


def _same_bits(mine: Record, other: Record) -> float | None:
    digests = [digest for record in (mine, other) for digest in record.summary.get("replica_digests") or []]
    return float(len(set(digests)) == 1) if digests and None not in digests else None


FIGURES = {
    "speed": Figure(
        "x {over}",
        lambda mine, other: _quotient(mine.value("images_per_second"), other.value("images_per_second")),
        relative=True,
        lead=True,
    ),
    "cpu": Figure("CPU seconds, x {over}", lambda mine, other: _quotient(_cpu(mine), _cpu(other)), relative=True),
    "bytes": Figure("bytes, x {over}", lambda mine, other: _quotient(mine.sent, other.sent), relative=True),
    "same_bits": Figure("same bits as {over} (1: yes)", _same_bits, relative=True),
    "bound": Figure("iteration / bound", lambda mine, _: _quotient(mine.iteration, mine.bound)),
    "cpu_per_gb": Figure("CPU seconds per GB sent", lambda mine, _: _quotient(_cpu(mine), (mine.sent or 0.0) / 1e9)),
    "worst": Figure("longest / median iteration", lambda mine, _: _quotient(mine.of_iterations("max"), mine.iteration)),
}
