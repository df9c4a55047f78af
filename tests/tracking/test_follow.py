"""A store that fails while a run goes on: the run neither fails nor waits, and what was missed comes later."""

from __future__ import annotations

import threading
import time

import pytest

from poseidon.tracking import follow
from poseidon.tracking.follow import Follower
from poseidon.tracking.upload import Upload

from .conftest import make_run, runs


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(follow, "INTERVAL", 0.01)
    monkeypatch.setattr(follow, "LONGEST_INTERVAL", 0.02)


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run")


class Moody:
    """Makes uploads that fail as long as ``down`` is set; counts attempts."""

    def __init__(self, store, folder):
        self.store, self.folder = store, folder
        self.down = False
        self.attempts = 0
        self.tried = threading.Condition()

    def __call__(self):
        self._fail()
        made = Upload(self.store, self.store.experiment("e"), self.folder)
        for name in ("advance", "end"):
            setattr(made, name, self._guarded(getattr(made, name)))
        return made

    def wait(self, more=2):
        with self.tried:
            goal = self.attempts + more
            assert self.tried.wait_for(lambda: self.attempts >= goal, timeout=30)

    def _guarded(self, method):
        def call():
            self._fail()
            method()

        return call

    def _fail(self):
        with self.tried:
            self.attempts += 1
            self.tried.notify_all()
        if self.down:
            raise OSError(111, "Connection refused")


def test_a_run_is_followed_and_ended(store, folder):
    said = []
    follower = Follower(Moody(store, folder), said.append)
    assert follower.begin(30)
    assert follower.run_id == runs(store, "e")[0].info.run_id
    assert follower.end() is None
    assert runs(store, "e")[0].info.status == "FINISHED"
    assert said == []


def test_a_store_that_is_gone_for_a_while_costs_one_line(store, folder):
    said, moody = [], Moody(store, folder)
    follower = Follower(moody, said.append)
    assert follower.begin(30)
    moody.down = True
    moody.wait(6)
    moody.down = False
    moody.wait()
    assert follower.end() is None
    assert len(said) == 1
    assert "connection refused" in said[0]
    (run,) = runs(store, "e")
    assert run.info.status == "FINISHED"
    assert len(store.client.get_metric_history(run.info.run_id, "train/loss")) == 2


def test_a_store_that_stays_away_is_told_at_the_end(store, folder):
    said, moody = [], Moody(store, folder)
    follower = Follower(moody, said.append)
    assert follower.begin(30)
    moody.down = True
    moody.wait()
    assert follower.end() == "connection refused"
    assert len(said) <= 1
    assert runs(store, "e")[0].info.status == "RUNNING"


def test_a_store_that_is_down_at_the_start_gets_the_run_when_it_is_back(store, folder):
    said, moody = [], Moody(store, folder)
    moody.down = True
    follower = Follower(moody, said.append)
    assert not follower.begin(30)
    assert follower.failure == "connection refused"
    moody.down = False
    moody.wait(3)
    assert follower.end() is None
    assert runs(store, "e")[0].info.status == "FINISHED"


def test_a_store_that_hangs_delays_neither_the_start_nor_the_end_for_long(folder):
    never = threading.Event()
    follower = Follower(lambda: never.wait(), lambda line: None)
    begun = time.monotonic()
    assert not follower.begin(0.1)
    assert "no answer" in follower.failure
    assert "no answer" in follower.end(patience=0.1)
    assert time.monotonic() - begun < 5
    never.set()


def test_one_who_has_given_up_logs_nothing_more(store, folder):
    moody = Moody(store, folder)
    follower = Follower(moody, lambda line: None)
    assert follower.begin(30)
    follower.give_up()
    assert follower.end() is None
    assert runs(store, "e")[0].info.status == "RUNNING"
