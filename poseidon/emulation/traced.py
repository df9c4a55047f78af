"""An emulated accelerator's timelines, recorded: exact, whenever the threads that queue on them run."""

from __future__ import annotations

from poseidon.emulation.timeline import Timeline
from poseidon.tracing import About, Row, Tracer


class TracedTimeline(Timeline):
    """A timeline whose jobs are spans of a row."""

    def __init__(self, tracer: Tracer, row: Row) -> None:
        super().__init__()
        self._tracer, self._row = tracer, row

    def reserve(self, seconds: float, what: str = "", layer: str = "") -> float:
        end = super().reserve(seconds)
        about = About(f"{what} {layer}".strip(), layer, {"pass": what}) if what else self._tracer.about
        self._tracer.span(self._row, about, end - seconds, end)
        return end
