from __future__ import annotations

import threading

from poseidon.transport import Header, Kind, inproc_mesh
from poseidon.transport.frames import HEADER_BYTES
from tests.transport.mesh import Recorder


def test_messages_counts_and_errors():
    endpoints = inproc_mesh(3)
    recorders = [Recorder() for _ in endpoints]
    for endpoint, recorder in zip(endpoints, recorders, strict=True):
        endpoint.start(recorder)
    data = bytearray(b"abc")
    sent = threading.Event()

    def go() -> None:
        endpoints[0].send(1, Header(Kind.PUSH, 0, unit=7), data)
        endpoints[0].send(2, Header(Kind.PUSH_NONE, 0))
        endpoints[0].send(1, Header(Kind.PUSH, 77), data)  # no such rank
        endpoints[0].send(1, Header(Kind.PUSH, 1), data)  # from itself?
        sent.set()

    endpoints[0].post(go)
    assert sent.wait(5)
    data[:] = b"xyz"
    recorders[1].wait(lambda r: len(r.messages) == 1)
    recorders[2].wait(lambda r: r.messages)
    header, payload = recorders[1].messages[0]
    assert (header.unit, header.length, header.total, payload) == (7, 3, 3, b"abc")
    assert endpoints[1].counters.received[0] == endpoints[0].counters.sent[1] - 2 * (len(data) + HEADER_BYTES)

    endpoints[2].post(lambda: 1 / 0)
    recorders[2].wait(lambda r: r.errors)
    endpoints[2].post(lambda: endpoints[2].send(1, Header(Kind.PUSH, 2)))  # the thread lives on
    recorders[1].wait(lambda r: len(r.messages) == 2)
    endpoints[2].lose(0, "cut")
    recorders[2].wait(lambda r: r.lost == [(0, "cut")])
    assert endpoints[1].counters.stranger_frames == 2
    for endpoint in endpoints:
        endpoint.close(5)
        endpoint.close(5)
    assert not [t for t in threading.enumerate() if t.name.startswith("poseidon-comm")]
