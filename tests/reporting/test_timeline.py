"""``poseidon trace``: traces of ranks, put together and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poseidon import cli
from poseidon.reporting.timeline import load
from poseidon.reporting.transfers import transfers
from poseidon.tracing import Event, Row, write

ABOUT = {
    "nodes": 2,
    "iterations": [3],
    "model": "lenet",
    "comm": "ps",
    "overlap": "backward",
    "batch_size": 32,
    "bandwidth": "1gbit",
    "hardware": "titan_x",
}


def message(row: Row, start: float, number: int, peer: int, end: float | None = None, receiver: int = 1) -> Event:
    details = {"message": f"PUSH.{number}>{receiver}", "peer": peer, "layer": "fc", "kind": "Linear", "bytes": 4}
    return Event(row, "fc", start, end or start + 0.001, details)


def iteration() -> Event:
    return Event(Row.iteration, "iteration 3", 10.0, 12.0, {"iteration": 3})


RANKS = {
    0: [
        iteration(),
        Event(Row.device, "forward fc", 10.0, 10.5, {"layer": "fc", "kind": "Linear", "pass": "forward"}),
        Event(Row.device, "reconstruct fc", 11.5, 11.6, {"layer": "fc", "kind": "Linear", "pass": "reconstruct"}),
        Event(Row.device, "optimizer step", 11.9, 12.0, {"pass": "optimizer step"}),
        Event(Row.collective, "bucket 0: fc", 10.5, 11.5, {"layer": "fc", "kind": "Linear"}),
        message(Row.send, 10.6, 1, 1),
        message(Row.send, 10.7, 2, 1),
    ],
    1: [
        iteration(),
        message(Row.receive, 11.0, 1, 0),
        message(Row.receive, 11.4, 2, 0),
        message(Row.receive, 11.6, 9, 0),
    ],
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for rank, events in RANKS.items():
        write(tmp_path / "run" / "trace" / f"rank{rank}.json", rank, events, ABOUT, dilation=2.0)
    return tmp_path / "run"


def test_a_message_is_on_its_way_once_the_one_before_it_has_come() -> None:
    first, second, unknown = transfers(RANKS)
    assert (first.sender, first.receiver, first.start, first.end) == (0, 1, 10.6, 11.0)
    assert (second.start, second.end) == (11.0, 11.4)
    assert (unknown.sender, unknown.start, unknown.end) == (0, 11.6, 11.6)  # sent before traces were kept


def test_one_file_of_all_ranks_with_arrows(run_dir: Path, capsys: Any) -> None:
    assert cli.main(["trace", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"timeline: {run_dir}/trace/all.json",
        f"timeline: {run_dir}/trace/timeline.png",
    ]
    entries = json.loads((run_dir / "trace" / "all.json").read_text())["traceEvents"]
    assert min(entry["ts"] for entry in entries if entry["ph"] == "X") == 0
    arrows = {phase: [entry for entry in entries if entry["ph"] == phase] for phase in "sf"}
    assert [entry["id"] for entry in arrows["s"]] == [0, 1]
    assert {entry["pid"] for entry in arrows["f"]} == {1}
    link = [(entry["ts"], entry["dur"]) for entry in entries if entry.get("cat") == "link"]
    assert link == [(300000.0, 200000.0), (500000.0, 200000.0), (800000.0, 0.0)]  # undilated
    assert {"rank 0", "rank 1", "link to rank 1"} <= {
        entry["args"].get("name") for entry in entries if entry["ph"] == "M"
    }
    assert cli.main(["trace", str(run_dir)]) == 0  # the merged file is not taken for a rank's


def test_several_runs_and_ranks_in_one_picture(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "pictures" / "both.svg"
    assert cli.main(["trace", str(run_dir), str(run_dir), "ranks=0,1", f"output={file}"]) == 0
    text = file.read_text()
    for shown in ("lenet: iteration 3", "ps, rank 0", "ps, rank 1", "collectives", "receive", "reconstruction", "1 s"):
        assert shown in text
    assert load(run_dir).iterations[0].end == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: is no folder of a run"),
        ([], "name the folders"),
        (["."], "trace/rank0.json: is it a run's folder? A run writes it with trainer.trace=[6]"),
        (["run", "ranks=2"], "ranks=2: run has traces of ranks 0, 1"),
        (["run", "ranks=all"], "ranks=all: must be numbers"),
        (["run", "output=a.pdf"], "output=a.pdf: must end with .png or .svg"),
    ],
)
def test_a_mistake_is_one_line(
    run_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", *(arguments or ["output=x.png"])]) == 2
    err = capsys.readouterr().err
    assert err.startswith("poseidon trace: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_help(capsys: Any) -> None:
    assert cli.main(["trace", "--help"]) == 0
    assert "trainer.trace" in capsys.readouterr().out
