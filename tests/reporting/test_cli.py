"""``poseidon report`` on the command line."""

from __future__ import annotations

import pytest

from poseidon import cli


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_the_report_s_path_is_printed_and_nothing_else_is_left_behind(store, here, capfd):
    assert cli.main(["report", "report.experiment=one", f"tracking.uri={store}", "report.name=a"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == f"report: {here.resolve() / 'reports' / 'a' / 'index.html'}"
    assert err == ""
    assert [path.name for path in here.iterdir()] == ["reports"]
    assert sorted(path.name for path in (here / "reports" / "a").iterdir()) == ["data", "figures", "index.html"]


def test_the_store_is_mlflow_s_own_variable(store, here, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert cli.main(["report", "report.experiment=nope"]) == 2
    assert "no such experiment" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "report.experiment has no value"),
        (["report.experiment=nope"], "`poseidon train tracking.experiment=nope` makes one"),
        (["report.experiment=one", "report.nmae=a"], "report.nmae"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(store, here, capfd, arguments, words):
    assert cli.main(["report", *arguments, f"tracking.uri={store}"]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_help_tells_the_keys(capsys):
    assert cli.main(["report", "--help"]) == 0
    printed = capsys.readouterr().out
    for words in ("report.experiment=NAME", "folder: reports", "comm=single"):
        assert words in printed
