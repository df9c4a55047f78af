"""Ranks that die, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from poseidon.transport import Kind, ZmqEndpoint
from tests.transport.mesh import LIMIT, TOKEN, Recorder, send, until

PEER = """
import json, os, sys, threading
from poseidon.transport import Header, Kind, ZmqEndpoint
from tests.transport.mesh import LIMIT, TOKEN, Recorder, say_bye

endpoint, recorder = ZmqEndpoint(1, 2), Recorder()
endpoint.start(recorder)
print(endpoint.contact, flush=True)
endpoint.connect([sys.stdin.readline().strip(), endpoint.contact], TOKEN, LIMIT)
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            sys.stdin.readline()  # a worker that lives as long as the test wants
            os._exit(0)
        print(child, flush=True)
    elif line == "bye\\n":
        say_bye(endpoint)
        endpoint.close(LIMIT)
        print("closed", flush=True)
"""


@contextlib.contextmanager
def peer() -> Iterator[tuple[ZmqEndpoint, Recorder, subprocess.Popen[str]]]:
    """Rank 0 here, rank 1 in a process of its own, connected."""
    endpoint, recorder = ZmqEndpoint(0, 2), Recorder()
    endpoint.start(recorder)
    process = subprocess.Popen([sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        contact = process.stdout.readline().strip()
        process.stdin.write(endpoint.contact + "\n")
        process.stdin.flush()
        endpoint.connect([endpoint.contact, contact], TOKEN, LIMIT)
        yield endpoint, recorder, process
    finally:
        process.kill()
        process.stdin.close()
        process.wait(LIMIT)
        process.stdout.close()
        endpoint.close(0)


def test_killed():
    with peer() as (endpoint, recorder, process):
        send(endpoint, 1, Kind.PUSH, bytes(16 << 20))
        start = time.monotonic()
        process.kill()
        recorder.wait(lambda r: r.lost, 5)
        assert time.monotonic() - start < 3
        assert recorder.lost[0][0] == 1
        send(endpoint, 1, Kind.PUSH, b"x")  # to nobody: no error
        assert recorder.errors == []
        assert endpoint.counters.stranger_connections == 0


def test_lost_with_messages_that_wait():
    with peer() as (endpoint, recorder, process):
        process.send_signal(signal.SIGSTOP)
        for _ in range(40):
            send(endpoint, 1, Kind.PUSH, bytes(1 << 20))
        until(lambda: endpoint.counters.queued > 10 << 20)
        process.kill()
        recorder.wait(lambda r: r.lost, 5)
        assert endpoint.counters.queued == endpoint.counters.in_flight == 0
        start = time.monotonic()
        endpoint.close(LIMIT)
        assert time.monotonic() - start < LIMIT / 2


def test_stopped_is_slow_not_dead():
    with peer() as (_, recorder, process):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(AssertionError):
            recorder.wait(lambda r: r.lost, 1)
        process.send_signal(signal.SIGCONT)


def test_killed_while_its_forked_workers_live():
    with peer() as (_, recorder, process):
        process.stdin.write("fork\n")
        process.stdin.flush()
        worker = int(process.stdout.readline())
        try:
            os.kill(process.pid, signal.SIGKILL)
            recorder.wait(lambda r: r.lost, 5)
            os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)


def test_not_lost_after_a_goodbye():
    with peer() as (endpoint, recorder, process):
        process.stdin.write("bye\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        process.kill()
        process.wait(LIMIT)
        recorder.wait(lambda r: len(r.messages) == 2)
        with pytest.raises(AssertionError):
            recorder.wait(lambda r: r.lost, 1.2)
        assert endpoint.counters.stranger_connections == 0
