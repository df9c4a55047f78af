"""A rank's timeline: what it did when, kept in memory, written as Chrome trace JSON (chrome://tracing, Perfetto).

Nothing here is touched by a run without ``trainer.trace``: what records is put around a rank's parts when they are made
(``engine.traced``, ``emulation.traced``), or hooked to the model for the chosen iterations only.
"""

from poseidon.tracing.chrome import FOLDER, names, rank_file, read, write
from poseidon.tracing.layers import LayerHooks
from poseidon.tracing.tracer import About, Event, Row, Tracer

__all__ = ["FOLDER", "About", "Event", "LayerHooks", "Row", "Tracer", "names", "rank_file", "read", "write"]
