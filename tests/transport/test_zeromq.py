"""The mesh with real sockets, on loopback only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading

import pytest
import zmq

from poseidon.errors import PoseidonError, UserError
from poseidon.transport import MAX_PAYLOAD, Header, Kind, ZmqEndpoint, is_loopback
from poseidon.transport.frames import HEADER_BYTES, pack
from tests.transport.mesh import LIMIT, TOKEN, Recorder, join, mesh, ports, say_bye, send, until


def test_messages_both_ways():
    with mesh(3) as (endpoints, recorders):
        for sender in endpoints:
            for peer in range(3):
                if peer != sender.rank:
                    send(sender, peer, Kind.PUSH, f"{sender.rank} to {peer}".encode())
                    send(sender, peer, Kind.TEXT, None, urgent=True)
        for rank, recorder in enumerate(recorders):
            recorder.wait(lambda r: len(r.messages) == 4)
            others = {0, 1, 2} - {rank}
            assert {h.rank for h, _ in recorder.messages} == others
            assert {p for h, p in recorder.messages if h.kind is Kind.PUSH} == {
                f"{o} to {rank}".encode() for o in others
            }
            assert recorder.threads == {f"poseidon-comm-{rank}"}
        sent, received = endpoints[0].counters.sent, endpoints[1].counters.received
        assert sent[1] == received[0] == 4 * HEADER_BYTES + len("0 to 1")


def test_large_messages_without_copies():
    size = 8 << 20
    with mesh(2) as (endpoints, recorders):
        data = bytearray(os.urandom(size))
        for _ in range(4):
            send(endpoints[0], 1, Kind.PUSH, memoryview(data))
        recorders[1].wait(lambda r: len(r.messages) == 4)
        assert all(payload == data for _, payload in recorders[1].messages)


@pytest.mark.parametrize("encryption", [None, "curve"])
def test_the_largest_message(encryption):
    with mesh(2, encryption=encryption) as (endpoints, recorders):
        send(endpoints[0], 1, Kind.PUSH, bytearray(MAX_PAYLOAD))
        recorders[1].wait(lambda r: r.messages)
        send(endpoints[0], 1, Kind.PUSH, bytearray(MAX_PAYLOAD + 1))
        recorders[0].wait(lambda r: r.errors)
        assert "largest" in str(recorders[0].errors[0])
        send(endpoints[0], 1, Kind.PUSH)
        recorders[1].wait(lambda r: len(r.messages) == 2)


def test_urgent_overtakes_bulk():
    with mesh(2) as (endpoints, recorders):
        data = bytes(16 << 20)

        def flood() -> None:
            for _ in range(16):
                endpoints[0].send(1, Header(Kind.PUSH, 0), data)
            endpoints[0].send(1, Header(Kind.ABORT, 0), b"\0\0", urgent=True)

        endpoints[0].post(flood)
        recorders[1].wait(lambda r: len(r.messages) == 17)
        position = [h.kind for h, _ in recorders[1].messages].index(Kind.ABORT)
        assert position < 16


def test_a_message_that_cannot_be_sent_leaves_nothing_behind():
    with mesh(2) as (endpoints, recorders):
        send(endpoints[0], 1, Kind.PUSH, memoryview(bytes(100))[::2])  # holes
        endpoints[0].post(lambda: endpoints[0].send(1, Header(Kind.PUSH, 0, rows=-1), b"abc"))
        recorders[0].wait(lambda r: len(r.errors) == 2)
        send(endpoints[0], 1, Kind.PUSH, b"abc")
        recorders[1].wait(lambda r: r.messages)
        assert recorders[1].messages[0][1] == b"abc"
        assert endpoints[1].counters.stranger_frames == 0


def test_an_error_in_the_thread_is_reported_and_does_not_end_it():
    with mesh(2) as (endpoints, recorders):
        fails = recorders[1].on_message
        recorders[1].on_message = lambda header, payload: 1 / 0  # type: ignore[method-assign]
        send(endpoints[0], 1, Kind.PUSH)
        recorders[1].wait(lambda r: r.errors)
        endpoints[1].post(lambda: [][0])
        recorders[1].wait(lambda r: len(r.errors) == 2)
        recorders[1].on_message = fails  # type: ignore[method-assign]
        send(endpoints[0], 1, Kind.PUSH)
        recorders[1].wait(lambda r: r.messages)


def test_the_end_of_the_thread_itself_is_reported(monkeypatch):
    with mesh(2) as (endpoints, recorders):
        monkeypatch.setattr(endpoints[0], "_watch", lambda: 1 / 0)
        endpoints[0].post(lambda: None)
        recorders[0].wait(lambda r: r.errors)


def test_posts_from_many_threads_all_run():
    with mesh(2) as (endpoints, _):
        done: list[int] = []
        all_done = threading.Event()

        def add(value: int) -> None:
            done.append(value)
            if len(done) == 8 * 500:
                all_done.set()

        def post(base: int) -> None:
            for value in range(500):
                endpoints[0].post(lambda v=base + value: add(v))

        threads = [threading.Thread(target=post, args=(500 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        assert all_done.wait(LIMIT)
        assert sorted(done) == list(range(4000))


# --- the end ------------------------------------------------------------------------------------------------


def test_close_flushes_and_leaves_nothing():
    before = set(threading.enumerate())
    endpoints = [ZmqEndpoint(rank, 2) for rank in range(2)]
    recorders = [Recorder(), Recorder()]
    join(endpoints, recorders)
    for _ in range(8):
        send(endpoints[0], 1, Kind.PUSH, bytes(4 << 20))
    say_bye(endpoints[0])
    endpoints[0].close(LIMIT)
    endpoints[0].close(LIMIT)
    recorders[1].wait(lambda r: len(r.messages) == 10)
    kinds = [h.kind for h, _ in recorders[1].messages if h.kind is Kind.PUSH or h.kind is Kind.BYE]
    assert kinds.count(Kind.PUSH) == 8
    assert kinds[-1] is Kind.BYE
    send(endpoints[1], 0, Kind.PUSH, b"to nobody")  # dropped
    say_bye(endpoints[1])
    endpoints[1].close(LIMIT)
    assert endpoints[1].counters.stranger_connections == 0
    assert recorders[1].lost == []
    assert recorders[1].errors == []
    # pyzmq keeps one collector thread of its own per process.
    left = {t for t in set(threading.enumerate()) - before if "arbage" not in type(t).__name__}
    assert not left
    endpoints[0].post(lambda: None)  # does nothing, raises nothing


@pytest.mark.parametrize("encryption", [None, "curve"])
def test_close_without_connect(encryption):
    endpoint = ZmqEndpoint(0, 2, encryption=encryption)
    endpoint.close(1)
    endpoint.close(1)


def test_close_from_a_stuck_thread_gives_up(monkeypatch, caplog):
    with mesh(2) as (endpoints, _):
        blocked, go = threading.Event(), threading.Event()
        endpoints[0].post(lambda: (blocked.set(), go.wait(LIMIT)))
        assert blocked.wait(LIMIT)
        join_ = endpoints[0]._thread.join
        monkeypatch.setattr(endpoints[0]._thread, "join", lambda seconds: join_(0.1))
        endpoints[0].close(1)
        assert "does not end" in caplog.text
        go.set()


def test_connect_names_the_missing_rank():
    endpoints = [ZmqEndpoint(rank, 3) for rank in range(3)]
    try:
        contacts = [endpoint.contact for endpoint in endpoints]
        for endpoint in endpoints:
            endpoint.start(Recorder())

        def join_too() -> None:
            with pytest.raises(PoseidonError):
                endpoints[1].connect(contacts, TOKEN, 0.5)

        third = threading.Thread(target=join_too)
        third.start()
        with pytest.raises(PoseidonError, match=r"rank 0: no connection from rank 2 at .*127\.0\.0\.1"):
            endpoints[0].connect(contacts, TOKEN, 0.5)
        third.join(LIMIT)
    finally:
        for endpoint in endpoints:
            endpoint.close(0)


def test_start_after_connect_is_an_error():
    with mesh(2) as (endpoints, _), pytest.raises(RuntimeError, match="before connect"):
        endpoints[0].start(Recorder())


# --- strangers ----------------------------------------------------------------------------------------------

ZMTP1 = b"\x01\x00"  # an anonymous peer's greeting in ZMTP 1.0, which has no handshake


def zmtp1(*frames: bytes) -> bytes:
    """One message in ZMTP 1.0 framing."""
    out = b""
    for index, frame in enumerate(frames):
        more = int(index < len(frames) - 1)
        size = len(frame) + 1
        out += (bytes([size]) if size < 255 else b"\xff" + struct.pack(">Q", size)) + bytes([more]) + frame
    return out


def raw_send(port: int, data: bytes) -> None:
    """Say `data`, and stay until the other side hangs up or has nothing to say."""
    with socket.create_connection(("127.0.0.1", port), LIMIT) as sock, contextlib.suppress(OSError):
        sock.settimeout(0.5)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


NOISE = {
    "nothing": b"",
    "random": bytes(random_byte * 37 % 256 for random_byte in range(1, 3000)),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
    "zmtp3 greeting, then noise": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00NULL"
    + bytes(48)
    + b"\x04\x19\x05READY"
    + b"x" * 40,
    "oversize in zmtp1": ZMTP1 + b"\xff" + struct.pack(">Q", MAX_PAYLOAD * 2) + b"\0" + bytes(100),
}


@pytest.mark.parametrize("kind", NOISE)
def test_random_bytes_are_counted_and_ignored(kind):
    with mesh(2) as (endpoints, recorders):
        for port in ports(endpoints[0]):
            raw_send(port, NOISE[kind])
        counters = endpoints[0].counters
        until(lambda: counters.stranger_connections == 2)
        traffic_goes_on(endpoints, recorders)


@pytest.mark.parametrize(
    "frames",
    [
        (b"hello",),
        (b"",),
        (b"x" * HEADER_BYTES,),
        (pack(Header(Kind.PUSH, 1), b"another job 1234"),),
        (pack(Header(Kind.PUSH, 1, length=3, total=3), TOKEN), b"ab"),
        (pack(Header(Kind.PUSH, 1, length=1, total=1), TOKEN), b"a", b"b"),
        (pack(Header(Kind.PUSH, 0), TOKEN),),  # it claims to be the receiver itself
        (pack(Header(Kind.PUSH, 2), TOKEN),),
    ],
)
def test_frames_that_libzmq_lets_through_are_counted_and_ignored(frames):
    with mesh(2) as (endpoints, recorders):
        raw_send(ports(endpoints[0])[0], ZMTP1 + 3 * zmtp1(*frames))
        counters = endpoints[0].counters
        until(lambda: counters.stranger_frames == 3)
        until(lambda: counters.stranger_connections == 1)
        traffic_goes_on(endpoints, recorders)


def traffic_goes_on(endpoints: list[ZmqEndpoint], recorders: list[Recorder]) -> None:
    for endpoint in endpoints:
        send(endpoint, 1 - endpoint.rank, Kind.PUSH, b"fine")
    for recorder in recorders:
        recorder.wait(lambda r: r.messages)
        assert [payload for _, payload in recorder.messages] == [b"fine"]
        assert recorder.lost == []
        assert recorder.errors == []


def test_a_second_job_on_the_same_ports():
    """Ranks of another job that were given this job's contacts: all they say is counted and dropped."""
    with mesh(2) as (endpoints, recorders):
        stranger = ZmqEndpoint(1, 2)
        stranger.start(Recorder())
        try:
            with pytest.raises(PoseidonError, match="no connection from rank 0"):
                stranger.connect([endpoints[0].contact, stranger.contact], b"another job 1234", 0.2)
            send(stranger, 0, Kind.PUSH, bytes(1000))
            until(lambda: endpoints[0].counters.stranger_frames == 3)  # two HELLOs
        finally:
            stranger.close(1)
        until(lambda: endpoints[0].counters.stranger_connections == 2)
        traffic_goes_on(endpoints, recorders)


def test_oversize_messages_end_the_strangers_connection():
    context = zmq.Context()
    try:
        with mesh(2) as (endpoints, recorders):
            sock = context.socket(zmq.PUSH)
            sock.connect(f"tcp://127.0.0.1:{ports(endpoints[0])[0]}")
            sock.send(bytes(MAX_PAYLOAD + 4096), copy=False)
            until(lambda: endpoints[0].counters.stranger_connections >= 1)
            sock.close(linger=0)
            traffic_goes_on(endpoints, recorders)
    finally:
        context.destroy(linger=0)


def test_a_strangers_flood_does_not_hide_a_death():
    context = zmq.Context()
    flooding = True
    sock = context.socket(zmq.PUSH)

    def flood() -> None:
        while flooding:
            sock.send(b"x" * 10)

    with mesh(2) as (endpoints, recorders):
        sock.connect(f"tcp://127.0.0.1:{ports(endpoints[0])[0]}")
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            until(lambda: endpoints[0].counters.stranger_frames > 1000)
            endpoints[1].close(0)  # no goodbye
            recorders[0].wait(lambda r: r.lost)
        finally:
            flooding = False
            thread.join(LIMIT)
            context.destroy(linger=0)


# --- encryption ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.1", "::", "127.example.org", "example.org"])
def test_off_loopback_needs_a_choice(address):
    with pytest.raises(UserError, match=r"comm\.encryption must be written down to listen on"):
        ZmqEndpoint(0, 2, address=address)


def test_is_loopback():
    assert all(is_loopback(a) for a in ("127.0.0.1", "127.0.1.1", "::1", "localhost"))
    assert not any(
        is_loopback(a) for a in ("0.0.0.0", "::", "10.1.2.3", "127.0.0.1.example.org", "localhost.example.org")
    )


def test_an_address_of_another_host_is_a_users_mistake():
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        ZmqEndpoint(0, 2, address="192.0.2.1", encryption="curve")


@pytest.mark.parametrize("encryption", ["curve", "none"])
def test_encrypted(encryption):
    with mesh(3, encryption=encryption) as (endpoints, recorders):
        for sender in endpoints:
            for peer in range(3):
                if peer != sender.rank:
                    send(sender, peer, Kind.PUSH, bytes(1 << 20))
                    send(sender, peer, Kind.TEXT, b"hi", urgent=True)
        for recorder in recorders:
            recorder.wait(lambda r: len(r.messages) == 4)


@pytest.mark.parametrize("client", ["no key", "own key"])
def test_a_client_without_an_allowed_key_cannot_deliver(client):
    context = zmq.Context()
    try:
        with mesh(2, encryption="curve") as (endpoints, recorders):
            *_, server_key = json.loads(endpoints[0].contact)
            for port in ports(endpoints[0]):
                sock = context.socket(zmq.PUSH)
                sock.linger = 0
                if client == "own key":
                    sock.curve_serverkey = server_key.encode()
                    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
                sock.connect(f"tcp://127.0.0.1:{port}")
                # Even the right token does not help.
                sock.send(pack(Header(Kind.PUSH, 1), TOKEN))
            until(lambda: endpoints[0].counters.stranger_connections >= 2)
            context.destroy(linger=0)
            traffic_goes_on(endpoints, recorders)
            assert endpoints[0].counters.stranger_frames == 0
    finally:
        context.destroy(linger=0)


def test_bulk_in_the_clear_when_told_so():
    """encryption="none": a stranger reaches the bulk port, and is counted; the urgent port stays shut."""
    with mesh(2, encryption="none") as (endpoints, recorders):
        bulk, urgent = ports(endpoints[0])
        raw_send(bulk, ZMTP1 + zmtp1(b"hello"))
        until(lambda: endpoints[0].counters.stranger_frames == 1)
        raw_send(urgent, ZMTP1 + zmtp1(b"hello"))
        until(lambda: endpoints[0].counters.stranger_connections == 2)
        assert endpoints[0].counters.stranger_frames == 1
        traffic_goes_on(endpoints, recorders)
