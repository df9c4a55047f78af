"""What the launching process shows of rank 0's progress, on a terminal and elsewhere."""

from __future__ import annotations

import io
import json

from rich.console import Console

from poseidon.cluster.base import LAUNCHER
from poseidon.training.progress import MARK, Display, emit, parse

RECORD = {
    "iteration": 20,
    "total": 100,
    "epoch": 0.4,
    "train_loss": 1.234567,
    "images_per_second": 1234.4,
    "mb_per_second": 12.34,
    "stall_share": 0.081,
}
EVALUATION = {
    "iteration": 50,
    "total": 100,
    "epoch": 1,
    "eval_accuracy": 0.9,
    "eval_loss": 0.3,
    "train_loss": 0.5,
}


def line(record):
    return MARK + json.dumps(record)


def display(terminal, **options):
    file = io.StringIO()
    return Display(Console(file=file, force_terminal=terminal, width=120), **options), file


def test_a_record_survives_the_pipe(capsys):
    emit(RECORD)
    assert parse(capsys.readouterr().out.rstrip("\n")) == RECORD
    assert parse("loss 3") is None
    assert parse(MARK + "{torn") is None
    assert parse(MARK + "[1]") is None


def test_plain_lines_come_now_and_then_and_at_the_end():
    shown, file = display(False, interval=3600)
    for iteration in (10, 20, 30, 100):
        shown.on_line(0, "stdout", line({**RECORD, "iteration": iteration}))
    assert file.getvalue().splitlines() == [
        f"iteration {i}/100  epoch 0.4  loss 1.235  1,234 images/s  12.3 MB/s  stall 8%" for i in (10, 100)
    ]
    assert shown.last["iteration"] == 100


def test_evaluations_are_always_shown_and_unknown_figures_left_out():
    shown, file = display(False, interval=3600)
    shown.on_line(0, "stdout", line(EVALUATION))
    shown.on_line(0, "stdout", line({**RECORD, "mb_per_second": None, "stall_share": None}))
    assert file.getvalue().splitlines() == [
        "epoch 1  evaluation: accuracy 90.00%, loss 0.3; training loss 0.5",
        "iteration 20/100  epoch 0.4  loss 1.235  1,234 images/s",
    ]


def test_a_terminal_gets_one_live_line_with_other_output_above_it():
    shown, file = display(True)
    shown.on_line(0, "stdout", line(RECORD))
    shown.on_line(1, "stderr", "a warning [with brackets]")
    shown.on_line(LAUNCHER, "launcher", "rank 1 is slow")
    shown._bar.refresh()
    text = file.getvalue()
    assert "20/100" in text
    assert "12.3 MB/s" in text
    assert "[rank 1] a warning [with brackets]" in text
    assert "rank 1 is slow" in text
    shown.close()
    shown.close()


def test_only_rank_0_speaks_for_the_run(capsys):
    shown, file = display(False)
    shown.on_line(1, "stdout", line(RECORD))
    shown.on_line(0, "stderr", line(RECORD))
    assert file.getvalue() == ""
    assert shown.last == {}
    captured = capsys.readouterr()
    assert captured.out.startswith("[rank 1] ")
    assert captured.err.startswith("[rank 0] ")
