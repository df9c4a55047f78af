"""The ZeroMQ mesh: every rank binds two receiving sockets and connects two sending ones to each peer.

Bound sockets only receive, so that nothing is ever dealt to a stranger. Bulk data and urgent messages
(aborts, plans) have connections of their own: an abort must not queue behind a gradient.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from poseidon.errors import PoseidonError, UserError
from poseidon.transport.base import Counters, Handler
from poseidon.transport.frames import HEADER_BYTES, Header, Kind, pack, sized, unpack

log = logging.getLogger("poseidon.transport")

#: Largest payload of one message; larger transfers are cut above this layer.
MAX_PAYLOAD = 64 * 1024 * 1024
#: After a reset connection, how long an abort that explains it may take to arrive.
GRACE_SECONDS = 0.5
#: Messages taken from one socket before the others get their turn.
BURST = 32


class ZmqEndpoint:
    """One rank's end of the mesh.

    Args:
        address: interface address to bind; ports are the system's choice.
        encryption: None on loopback; off loopback ``"curve"`` (everything encrypted and authenticated) or
            ``"none"`` (urgent traffic encrypted, bulk data in the clear).

    Raises:
        UserError: `address` is not a loopback address and `encryption` is None.
    """

    def __init__(
        self, rank: int, world_size: int, *, address: str = "127.0.0.1", encryption: str | None = None
    ) -> None:
        if encryption is None and not is_loopback(address):
            raise UserError(
                f"comm.encryption must be written down to listen on {address}: 'curve' (encrypted, about 2.4 CPU "
                "seconds per GB) or 'none' (gradients in the clear, for a network of your own)"
            )
        self.rank = rank
        self.world_size = world_size
        self.counters = Counters()
        self._context = zmq.Context(io_threads=1)
        self._secure = encryption is not None
        self._bulk_secure = encryption == "curve"
        self._public, self._secret = zmq.curve_keypair() if self._secure else (b"", b"")
        self._allowed: set[bytes] = set()
        self._contacts_known = threading.Event()
        self._auth: zmq.auth.thread.ThreadAuthenticator | None = None
        if self._secure:
            self._auth = zmq.auth.thread.ThreadAuthenticator(self._context, log=log)
            self._auth.start()
            self._auth.configure_curve_callback(credentials_provider=self)
        self._bulk_in, bulk_port = self._bind(address, self._bulk_secure)
        self._urgent_in, urgent_port = self._bind(address, self._secure)
        #: What peers need to connect: hand it out through the job's store.
        self.contact = json.dumps([address, bulk_port, urgent_port, self._public.decode()])
        self._bulk_out: dict[int, zmq.Socket[bytes]] = {}
        self._urgent_out: dict[int, zmq.Socket[bytes]] = {}
        self._in_monitors = [s.get_monitor_socket() for s in (self._bulk_in, self._urgent_in)]
        self._out_monitors: dict[int, zmq.Socket[bytes]] = {}
        self._shaken: set[tuple[int, int]] = set()
        self._token = b""
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._asleep = False
        self._stopping = False
        self._lost_at: dict[int, float] = {}
        self._said_hello: dict[int, int] = {}
        self._all_said_hello = threading.Event()
        self._handler: Handler | None = None
        self._thread: threading.Thread | None = None

    def _bind(self, address: str, secure: bool) -> tuple[zmq.Socket[bytes], int]:
        sock = self._context.socket(zmq.PULL)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD)
        sock.setsockopt(zmq.IPV6, int(":" in address))
        if secure:
            sock.curve_server = True
            sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
        host = f"[{address}]" if ":" in address else address
        return sock, sock.bind_to_random_port(f"tcp://{host}")

    def callback(self, domain: str, key: bytes) -> bool:
        """May a client with this CURVE key (z85) connect? Only the job's ranks may."""
        return self._contacts_known.wait(60) and key in self._allowed

    def connect(self, contacts: list[str], token: bytes, timeout: float) -> None:
        """Connect to every peer and wait until every peer is connected here.

        Args:
            contacts: every rank's `contact`, by rank.
            token: the job's 128 random bits; frames without it are strangers'.

        Raises:
            PoseidonError: a rank was not there in time; the message names it.
        """
        self._token = token
        parsed = [json.loads(contact) for contact in contacts]
        self._allowed.update(str(key).encode() for *_, key in parsed)
        self._contacts_known.set()
        for peer, (address, bulk, urgent, key) in enumerate(parsed):
            if peer == self.rank:
                continue
            self._bulk_out[peer] = self._connect(address, bulk, key if self._bulk_secure else "")
            self._urgent_out[peer] = self._connect(address, urgent, key)
            self._out_monitors[peer] = self._bulk_out[peer].get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._thread = threading.Thread(target=self._run, name=f"poseidon-comm-{self.rank}", daemon=True)
        self._thread.start()
        self.post(self._say_hello)
        if self.world_size > 1 and not self._all_said_hello.wait(timeout):
            missing = [r for r in range(self.world_size) if r != self.rank and self._said_hello.get(r, 0) < 2]
            raise PoseidonError(
                f"rank {self.rank}: no connection from rank {missing[0]} at {contacts[missing[0]]} within "
                f"{timeout:.0f} s; check that the hosts reach each other on every TCP port"
            )

    def _connect(self, address: str, port: int, key: str) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.PUSH)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.IPV6, int(":" in address))
        if key:
            sock.curve_serverkey = key.encode()
            sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
        host = f"[{address}]" if ":" in address else address
        sock.connect(f"tcp://{host}:{port}")
        return sock

    def _say_hello(self) -> None:
        for peer in self._bulk_out:
            self.send(peer, Header(Kind.HELLO, self.rank))
            self.send(peer, Header(Kind.HELLO, self.rank), urgent=True)

    def start(self, handler: Handler) -> None:
        if self._thread is not None:
            raise RuntimeError("start() comes before connect(): messages may arrive at once")
        self._handler = handler

    def post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)
        if self._asleep:
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake_out.send(b"x")

    def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False) -> None:
        sock = (self._urgent_out if urgent else self._bulk_out)[peer]
        length = 0 if payload is None else memoryview(payload).nbytes
        head = pack(sized(header, length), self._token)
        self.counters.sent[peer] += HEADER_BYTES + length
        if length:
            sock.send(head, zmq.SNDMORE | zmq.NOBLOCK)
            sock.send(payload, zmq.NOBLOCK, copy=False)
        else:
            sock.send(head, zmq.NOBLOCK)

    def close(self, timeout: float) -> None:
        if self._context.closed:
            return
        self._stopping = True
        self.post(lambda: None)
        if self._thread is not None:
            self._thread.join(timeout + 5)
        linger = int(timeout * 1000)
        if self._auth is not None:
            self._auth.stop()
        for sock in (*self._in_monitors, *self._out_monitors.values()):
            sock.close(linger=0)
        for sock in (self._bulk_in, self._urgent_in):
            sock.close(linger=0)
        for sock in (*self._bulk_out.values(), *self._urgent_out.values()):
            sock.close(linger=linger)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        inputs = (self._urgent_in, self._bulk_in)
        for sock in (*inputs, *self._in_monitors, *self._out_monitors.values()):
            poller.register(sock, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        monitors = {*self._in_monitors, *self._out_monitors.values()}
        while not (self._stopping and not self._posted):
            busy = self._run_posted()
            for sock in inputs:
                busy |= self._receive(sock)
            if busy:
                continue
            self._asleep = True
            ready = dict(poller.poll(0 if self._posted else self._poll_ms()))
            self._asleep = False
            if self._wake_in.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
            if not monitors.isdisjoint(ready):
                self._watch()
            self._report_lost()

    def _poll_ms(self) -> int:
        if not self._lost_at:
            return 1000
        return max(1, int(1000 * (min(self._lost_at.values()) - time.monotonic())) + 1)

    def _run_posted(self) -> bool:
        done = False
        while self._posted:
            self._posted.popleft()()
            done = True
        return done

    def _receive(self, sock: zmq.Socket[bytes]) -> bool:
        for count in range(BURST):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return count > 0
            payload = frames[1].buffer if len(frames) == 2 else memoryview(b"")
            head = frames[0].buffer if len(frames) <= 2 else b""
            header = unpack(head, self._token, self.world_size, payload.nbytes)
            if header is None or header.rank == self.rank:
                self.counters.stranger_frames += 1
                continue
            self.counters.received[header.rank] += HEADER_BYTES + payload.nbytes
            if header.kind is Kind.HELLO:
                self._hello(header.rank)
            elif self._handler is not None:
                self._handler.on_message(header, payload)
        return True

    def _hello(self, rank: int) -> None:
        self._said_hello[rank] = self._said_hello.get(rank, 0) + 1
        if sum(min(n, 2) for n in self._said_hello.values()) == 2 * (self.world_size - 1):
            self._all_said_hello.set()

    def _watch(self) -> None:
        """Read the connection events: strangers that failed the handshake, peers whose connection broke."""
        for index, monitor in enumerate(self._in_monitors):
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                self._judge(zmq.Event(event["event"]), (index, event["value"]))
        for peer, monitor in self._out_monitors.items():
            while monitor.poll(0):
                if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    self._lost_at.setdefault(peer, time.monotonic() + GRACE_SECONDS)

    def _judge(self, event: zmq.Event, connection: tuple[int, int]) -> None:
        if event is zmq.Event.ACCEPTED:
            self._shaken.discard(connection)
        elif event is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._shaken.add(connection)
        elif event is zmq.Event.DISCONNECTED:
            # A connection that ended without ever completing a handshake was not one of the job's.
            self.counters.stranger_connections += connection not in self._shaken
            self._shaken.discard(connection)

    def _report_lost(self) -> None:
        now = time.monotonic()
        for peer in [p for p, at in self._lost_at.items() if at <= now]:
            del self._lost_at[peer]
            if self._handler is not None:
                self._handler.on_lost(peer, "its connection was closed without a goodbye")


def is_loopback(address: str) -> bool:
    return address == "localhost" or address == "::1" or address.startswith("127.")
