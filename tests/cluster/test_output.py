"""Output arrives whole, whatever its shape."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.cluster.output import LineSplitter, Stream
from poseidon.cluster.screen import Screen, print_line

from .conftest import Job


def test_chatty_ranks_lose_nothing(job: Job) -> None:
    """Both pipes of both ranks are full most of the time; the last line comes right before the exit."""
    result = job.run(
        """
        block = "".join(f"{i:06d} " + "x" * 73 + chr(10) for i in range(1000))
        other = threading.Thread(target=lambda: [os.write(2, block.encode()) for _ in range(30)])
        other.start()
        for _ in range(30):
            os.write(1, block.encode())
        other.join()
        os.write(1, b"the end")
        os._exit(0)
        """
    )
    assert result.ok
    for rank in range(2):
        assert len(job.log(rank)) == 2 * 30 * 1000 * 81 + 7
        assert len(job.shown(rank, "stdout")) == 30_001
        assert job.shown(rank, "stdout")[-1] == "the end"
        assert len(job.shown(rank, "stderr")) == 30_000


def test_undecodable_and_long_lines(job: Job) -> None:
    assert job.run(r"os.write(1, b'caf\xe9\n' + b'y' * 300_000 + b'\nend\n')", 1).ok
    assert job.log(0) == b"caf\xe9\n" + b"y" * 300_000 + b"\nend\n"
    first, *long, last = job.shown(0)
    assert (first, last) == ("caf\ufffd", "end")
    assert "".join(long) == "y" * 300_000


def test_progress_bars_are_shown_now_and_then(job: Job) -> None:
    assert job.run(r"os.write(1, b''.join(b'\r%3d%%' % i for i in range(101)) + b'\nend\n')", 1).ok
    assert job.shown(0) == ["  0%", "100%", "end"]
    assert job.log(0).count(b"\r") == 101


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\xff"])), st.data())
def test_splitter_keeps_every_byte_however_it_is_fed(tokens: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(tokens)
    one = LineSplitter()
    expected = [*one.feed(whole), one.finish()]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    splitter = LineSplitter()
    pieces = [piece for part in parts for piece in splitter.feed(part)] + [splitter.finish()]
    assert pieces == expected
    assert b"".join(pieces) == whole
    assert all(piece.endswith((b"\r", b"\n")) for piece in pieces[:-1])
    assert all(b"\n" not in piece[:-1] for piece in pieces)


def test_unfinished_line_reaches_the_log_and_is_not_repeated() -> None:
    log, shown = io.BytesIO(), list[str]()
    stream = Stream(lambda data: log.write(data), shown.append)
    stream.feed(b"waiting for", 0.0)
    stream.tick(0.5)
    assert log.getvalue() == b""
    stream.tick(2.0)
    assert log.getvalue() == b"waiting for"
    stream.feed(b" godot\nnext", 3.0)
    stream.finish(3.0)
    assert log.getvalue() == b"waiting for godot\nnext"
    assert shown == ["waiting for godot", "next"]


def test_screen_shows_the_same_warning_of_every_rank() -> None:
    shown: list[tuple[int, str, str]] = []
    screen = Screen(lambda *line: shown.append(line), hold=1.0)
    for rank in range(2):
        screen.line(rank, "stderr", "a warning", 0.0)
    assert shown == [(0, "stderr", "a warning")]
    screen.tick([0, 1], 1.5)
    assert shown == [(0, "stderr", "a warning"), (1, "stderr", "a warning")]


def test_printing_survives_what_terminals_do(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_line(0, "stdout", "caf\u00e9")
    assert raw.getvalue() == b"[rank 0] caf\\xe9\n"
    sys.stdout.close()
    print_line(0, "stdout", "nobody is there any more")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_does_not_stop_the_run(job: Job) -> None:
    job.logs.mkdir()
    (job.logs / "rank0.log").symlink_to("/dev/full")
    assert job.run("print('one'); print('two', file=sys.stderr)", 1).ok
    assert set(job.shown(0)) == {"one", "two"}
    assert len(job.shown(-1)) == 1
    assert "No space left on device; training goes on without it" in job.shown(-1)[0]


def test_screen_drops_late_echoes_of_a_job_that_is_ending() -> None:
    shown: list[tuple[int, str, str]] = []
    screen = Screen(lambda *line: shown.append(line), hold=1.0)
    screen.line(0, "stderr", "your mistake", 0.0)
    screen.ending = True
    screen.line(1, "stderr", "your mistake", 60.0)
    screen.tick([1], 90.0)
    screen.release_failed(1, 90.0)
    assert shown == [(0, "stderr", "your mistake")]
