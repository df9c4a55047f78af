"""`poseidon ui`: MLflow's own server, started, looked at and ended."""

from __future__ import annotations

import json
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from poseidon import cli
from poseidon.cluster.sessions import members
from poseidon.errors import PoseidonError, UserError
from poseidon.tracking import ui
from poseidon.tracking.mlflow_store import Store
from poseidon.tracking.upload import Upload

from .conftest import environment, make_run, runs


def fetch(url, content=None):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data = None if content is None else json.dumps(content).encode()
    with opener.open(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=30) as answer:
        return answer.read().decode()


def children(pid):
    """Of a process, as /proc tells."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def read_line(process, seconds=110):
    assert select.select([process.stdout], [], [], seconds)[0]
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_store_in_a_browser_and_over_http(store, tmp_path, number, monkeypatch):
    Upload(store, store.experiment("shown"), make_run(tmp_path / "a")).all()
    command = [sys.executable, "-m", "poseidon", "ui", "ui.browser=false"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=-1, stderr=-1, text=True)
    try:
        url = re.match(r"MLflow: (http://127\.0\.0\.1:\d+) over sqlite:///", read_line(process))[1]
        if number == signal.SIGINT:
            look(url, tmp_path, monkeypatch)
        leaders = [pid for pid in children(process.pid) if members(pid)]
        begun = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - begun < 10
        assert (process.returncode, errors) == (0 if number == signal.SIGINT else 143, "")
        assert leaders
        assert [pid for pid in leaders if members(pid)] == []
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["a", "store", *(["down"] if number == signal.SIGINT else [])]
        )
    finally:
        process.kill()
        process.communicate()


def look(url, tmp_path, monkeypatch):
    """The page, the runs that are there, their files, and a run that is logged through the server."""
    assert "<html" in fetch(f"{url}/")
    found = json.loads(fetch(f"{url}/api/2.0/mlflow/experiments/search", {"max_results": 10}))["experiments"]
    assert "shown" in [experiment["name"] for experiment in found]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    remote = Store.open(url)
    (run,) = runs(remote, "shown")
    assert json.loads(fetch(f"{url}/get-artifact?run_id={run.info.run_id}&path=summary.json"))["comm"] == "hybrid"
    Upload(remote, remote.experiment("through the server"), make_run(tmp_path / "a", started="2026-02-01")).all()
    (run,) = runs(remote, "through the server")
    assert run.info.status == "FINISHED"
    (tmp_path / "down").mkdir()
    remote.client.download_artifacts(run.info.run_id, "metrics.jsonl", str(tmp_path / "down"))
    assert (tmp_path / "down" / "metrics.jsonl").read_text() == (tmp_path / "a" / "metrics.jsonl").read_text()


def test_no_store_is_one_line_that_says_what_makes_one(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert cli.main(["ui"]) == 2
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    assert "poseidon train" in message
    assert list(tmp_path.iterdir()) == []


def test_a_server_elsewhere_is_named_and_nothing_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("no browser was wanted"))
    assert cli.main(["ui", "tracking.uri=http://host:5000", "ui.browser=false"]) == 0
    assert capsys.readouterr().out == "MLflow: http://host:5000\n"

    def open_browser(url):
        raise OSError("no display")

    monkeypatch.setattr("webbrowser.open", open_browser)
    assert cli.main(["ui", "tracking.uri=http://host:5000"]) == 0


def test_ports():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"ui.port={port}: another program"):
            ui.free_port("127.0.0.1", port)
    assert ui.free_port("127.0.0.1", port) == port
    for number in (0, -1, 70000):
        with pytest.raises(UserError, match=f"ui.port={number}: a port is"):
            ui.free_port("127.0.0.1", number)
    with pytest.raises(UserError, match=r"ui\.host=192\.0\.2\.1"):
        ui.free_port("192.0.2.1", None)


def test_the_next_port_is_taken_if_one_is_not_free(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ui, "PORT", port)
        assert port < ui.free_port("127.0.0.1", None) < port + ui.PORTS
        monkeypatch.setattr(ui, "PORTS", 1)
        with pytest.raises(UserError, match="name another"):
            ui.free_port("127.0.0.1", None)


@pytest.mark.parametrize(
    ("words", "kind"),
    [("[Errno 98] ...: address already in use\nbye", ui.PortTakenError), ("Error: no\nbye", PoseidonError)],
)
def test_a_server_that_ends_at_once_is_quoted(monkeypatch, words, kind, store):
    popen = subprocess.Popen

    def start(command, **options):
        return popen([sys.executable, "-c", f"print({words!r})"], **options)

    monkeypatch.setattr(ui.subprocess, "Popen", start)
    server = ui.Server(store.uri, "127.0.0.1", ui.free_port("127.0.0.1", None))
    with pytest.raises(kind) as caught:
        server.wait()
    assert type(caught.value) is kind
    if kind is PoseidonError:
        assert "Error: no" in str(caught.value)
