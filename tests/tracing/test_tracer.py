"""Spans in memory, and as Chrome trace JSON."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from poseidon.errors import UserError
from poseidon.tracing import About, Event, Row, Tracer, read, write


def test_spans_are_kept_while_an_iteration_is_recorded_only() -> None:
    tracer = Tracer({"fc": "Linear"})
    tracer.span(Row.device, About("before", "fc"), 0.0, 1.0)
    tracer.begin(6)
    tracer.span(Row.device, About("forward fc", "fc", {"pass": "forward"}), 1.0, 2.0)
    tracer.end()
    tracer.span(Row.device, About("after", "fc"), 2.0, 3.0)
    forward, iteration = tracer.events
    assert forward == Event(Row.device, "forward fc", 1.0, 2.0, {"layer": "fc", "kind": "Linear", "pass": "forward"})
    assert (iteration.row, iteration.name) == (Row.iteration, "iteration 6")
    assert tracer.computed == 3.0


def test_what_a_thread_is_at_is_its_own() -> None:
    tracer, seen = Tracer(), []
    with tracer.at(About("outer")):
        with tracer.at(About("inner")):
            thread = threading.Thread(target=lambda: seen.append(tracer.about.name))
            thread.start()
            thread.join(10)
            seen.append(tracer.about.name)
        seen.append(tracer.about.name)
    assert seen == ["", "inner", "outer"]


def test_a_file_holds_undilated_microseconds_and_is_read_back(tmp_path: Path) -> None:
    events = [
        Event(Row.send, "fc", 100.0, 104.0, {"bytes": 8}),
        Event(Row.collective, "bucket 0", 100.0, 108.0),
        Event(Row.collective, "bucket 1", 104.0, 112.0),
        Event(Row.collective, "bucket 2", 108.0, 109.0),
    ]
    file = tmp_path / "trace" / "rank1.json"
    write(file, 1, events, {"comm": "ps"}, dilation=4.0)
    assert [path.name for path in file.parent.iterdir()] == ["rank1.json"]
    trace = json.loads(file.read_text())
    assert trace["otherData"]["comm"] == "ps"
    assert "divided by 4" in trace["otherData"]["clock"]
    slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    assert {(entry["pid"], entry["cat"]) for entry in slices} == {(1, "send"), (1, "collective")}
    assert (slices[0]["ts"], slices[0]["dur"], slices[0]["args"]) == (25e6, 1e6, {"bytes": 8})
    # What overlaps stands beside each other: a viewer would take it as nested.
    lanes = [entry["tid"] for entry in slices if entry["cat"] == "collective"]
    assert lanes[0] == lanes[2] == lanes[1] - 1
    shown = {entry["args"].get("name") for entry in trace["traceEvents"] if entry["ph"] == "M"}
    assert {"rank 1", "send", "collective", "collective (2)"} <= shown
    about, again = read(file)
    assert about["time_dilation"] == 4.0
    assert [(event.row, event.name, event.start, event.end) for event in again] == [
        (event.row, event.name, event.start / 4, event.end / 4) for event in events
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {}, "traceEvents": [{"ph": "X"}]}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rank0.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"rank0\.json: is no trace"):
        read(file)
