"""Exit codes of a rank, and what it says."""

from __future__ import annotations

import pytest

from poseidon.errors import PEER_LOST_EXIT, PeerLostError, PoseidonError, UserError
from poseidon.training import worker


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (UserError("the key\nis wrong"), 2),
        (PeerLostError(1, "rank 1 is gone"), PEER_LOST_EXIT),
        (PoseidonError("something else"), 1),
        (KeyboardInterrupt(), 130),
        (None, 0),
    ],
)
def test_one_line_and_a_code(monkeypatch, capsys, failure, code):
    def work(path):
        if failure is not None:
            raise failure

    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(worker, "_work", work)
    assert worker.main(["spec.json"]) == code
    said = capsys.readouterr().err
    assert said == (" ".join(str(failure).split()) + "\n" if isinstance(failure, PoseidonError) else "")


def test_other_failures_have_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(worker, "_work", lambda path: 1 / 0)
    assert worker.main(["spec.json"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_spec_is_the_users_mistake(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    assert worker.main([str(tmp_path / "spec.json")]) == 2
    assert worker.main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
