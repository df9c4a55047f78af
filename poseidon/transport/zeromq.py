"""The ZeroMQ mesh: every rank binds two receiving sockets and connects two sending ones to each peer.

Bound sockets only receive, so that nothing is ever dealt to a stranger. Bulk data and urgent messages
(aborts, plans, receipts) have connections of their own: an abort must not queue behind a gradient. Bulk data waits in
queues of ours (flow.py) until there is room among the bytes in flight to its peer; sockets have the system's buffers,
as a send buffer below four segments of the route stalls on delayed acknowledgements.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
import zmq.auth.thread

from poseidon.errors import PoseidonError, UserError
from poseidon.transport.addresses import is_loopback, url
from poseidon.transport.base import Counters, Handler
from poseidon.transport.flow import LAST, Flow
from poseidon.transport.frames import HEADER_BYTES, Header, Kind, body, seal, sized, unpack
from poseidon.transport.health import Health
from poseidon.transport.inherited import close_inherited
from poseidon.transport.monitors import heard, monitor

log = logging.getLogger("poseidon.transport")

#: Largest payload of one message; larger transfers are cut above this layer.
MAX_PAYLOAD = 64 * 1024 * 1024
#: What encryption adds to a message before its size is checked.
_ENVELOPE = 1024
#: Messages, and bytes, taken from one socket before the others get their turn: receipts keep the senders going.
BURST, BURST_BYTES = 32, 1024 * 1024
#: However busy or idle the traffic, connection events are looked at this often.
WATCH_SECONDS = 0.2
_POLL_MS = 200
BULK, URGENT = 0, 1
# As plain numbers: operations on zmq's own take longer than sending.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class ZmqEndpoint:
    """One rank's end of the mesh.

    Args:
        address: interface address to bind; ports are the system's choice.
        encryption: None on loopback; off loopback ``"curve"`` (everything encrypted and authenticated) or
            ``"none"`` (urgent traffic encrypted, bulk data in the clear).

    Raises:
        UserError: `address` is not a loopback address and `encryption` is None, or it is not this host's.
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
        self._flow = Flow((peer for peer in range(world_size) if peer != rank), self.counters)
        self._flush_until = 0.0  # once it is stopping: when it gives up what still waits
        self._context = zmq.Context(io_threads=1)
        self._secure = {BULK: encryption == "curve", URGENT: encryption is not None}
        self._public, self._secret = zmq.curve_keypair() if self._secure[URGENT] else (b"", b"")
        self._allowed: set[bytes] = set()
        self._contacts_known = threading.Event()
        self._auth: zmq.auth.thread.ThreadAuthenticator | None = None
        self._in: dict[int, zmq.Socket[bytes]] = {}
        self._in_monitors: dict[int, zmq.Socket[bytes]] = {}
        self._out: dict[tuple[int, int], zmq.Socket[bytes]] = {}  # by (peer, channel)
        self._out_monitors: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        self._urls: dict[tuple[int, int], str] = {}
        self._connected: set[zmq.Socket[bytes]] = set()  # monitors of connections that have stood
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._posted: deque[Callable[[], object]] = deque()
        self._token = b""
        self._asleep = self._stopping = self._forked = self._closed = False
        self._health = Health({peer for peer in range(world_size) if peer != rank})
        self._greeted = threading.Event()  # every peer has said HELLO, or one was lost
        self._lost_early: str | None = None
        self._handler: Handler | None = None
        self._thread: threading.Thread | None = None
        try:
            self._listen(address)
        except zmq.ZMQError as error:
            self.close(0)
            raise UserError(f"cannot listen on {address}: {error}") from None

    def _listen(self, address: str) -> None:
        if self._secure[URGENT]:
            self._auth = zmq.auth.thread.ThreadAuthenticator(self._context, log=log)
            self._auth.start()
            self._auth.configure_curve_callback(credentials_provider=self)
        ports = [self._bind(address, channel) for channel in (BULK, URGENT)]
        #: What peers need to connect: hand it out through the job's store.
        self.contact = json.dumps([address, *ports, self._public.decode()])
        self._own_ports = set(ports)
        self._peer_ports: set[tuple[str, int]] = set()
        this = weakref.ref(self)  # a hook at fork can't be taken back

        def in_child() -> None:
            endpoint = this()
            if endpoint is not None:
                endpoint._after_fork()

        os.register_at_fork(after_in_child=in_child)

    def _bind(self, address: str, channel: int) -> int:
        sock = self._in[channel] = self._context.socket(zmq.PULL)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD + _ENVELOPE)
        sock.setsockopt(zmq.IPV6, int(":" in address))
        if self._secure[channel]:
            sock.curve_server = True
            sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
        self._in_monitors[channel] = monitor(self._context, sock, zmq.EVENT_DISCONNECTED)
        return sock.bind_to_random_port(url(address))

    def callback(self, domain: str, key: bytes) -> bool:
        """May a client with this CURVE key (z85) connect? Only the job's ranks may."""
        return self._contacts_known.wait(60) and key in self._allowed

    def connect(self, contacts: list[str], token: bytes, timeout: float) -> None:
        """Connect to every peer and wait until every peer is connected here.

        Args:
            contacts: every rank's `contact`, by rank.
            token: the job's 128 random bits; frames without it are strangers'.

        Raises:
            PoseidonError: a rank was not there in time, or was lost meanwhile; the message names it.
        """
        self._token = token
        parsed = [json.loads(contact) for contact in contacts]
        self._allowed.update(str(key).encode() for *_, key in parsed)
        self._contacts_known.set()
        for peer, (address, *ports, key) in enumerate(parsed):
            for channel, port in enumerate(ports):
                if peer != self.rank:
                    self._connect(peer, channel, address, port, key)
        self._thread = threading.Thread(target=self._run, name=f"poseidon-comm-{self.rank}", daemon=True)
        self._thread.start()
        self.post(self._say_hello)
        if self.world_size > 1:
            came = self._greeted.wait(timeout)
            if self._lost_early:
                raise PoseidonError(f"rank {self.rank}: {self._lost_early}")
            if not came:
                missing = self._health.silent()[0]
                raise PoseidonError(
                    f"rank {self.rank}: no connection from rank {missing} at {contacts[missing]} within "
                    f"{timeout:.0f} s; check that the hosts reach each other on every TCP port"
                )

    def _connect(self, peer: int, channel: int, address: str, port: int, key: str) -> None:
        sock = self._out[peer, channel] = self._context.socket(zmq.PUSH)
        sock.setsockopt(zmq.SNDHWM, 0)
        # Until close() says otherwise: what is queued for a lost peer would keep libzmq from ever ending.
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IPV6, int(":" in address))
        if self._secure[channel]:
            sock.curve_serverkey = key.encode()
            sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
        self._out_monitors[peer, channel] = monitor(
            self._context, sock, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._peer_ports.add((address, port))
        self._urls[peer, channel] = f"{url(address)}:{port}"
        sock.connect(self._urls[peer, channel])

    def _say_hello(self) -> None:
        for peer, channel in self._out:
            self.send(peer, Header(Kind.HELLO, self.rank), urgent=channel == URGENT)

    def start(self, handler: Handler) -> None:
        if self._thread is not None:
            raise RuntimeError("start() comes before connect(): messages may arrive at once")
        self._handler = handler

    def post(self, call: Callable[[], object]) -> None:
        self._posted.append(call)
        if self._asleep and not self._forked:
            # Full means that a wake-up is under way.
            with contextlib.suppress(OSError):
                self._wake_out.send(b"x")

    def send(self, peer: int, header: Header, payload: Any = None, *, urgent: bool = False, priority: int = 0) -> None:
        if peer in self._health.gone:
            return
        data = memoryview(b"" if payload is None else payload)
        if data.nbytes > MAX_PAYLOAD:
            # The receiver would drop the connection.
            raise ValueError(f"a message of {data.nbytes} bytes; the largest is {MAX_PAYLOAD}")
        if data.nbytes:
            data = data.cast("B")  # refuses what is not contiguous before the header is out
        head = body(sized(header, data.nbytes), self._token)
        if urgent:
            self._put_out(peer, URGENT, seal(head, header.mark), data)
            return
        priority = LAST if header.kind is Kind.BYE else priority
        self._flow.put(peer, priority, HEADER_BYTES + data.nbytes, (head, data))
        self._pump(peer)

    def _pump(self, peer: int) -> None:
        """Send of what waits for a peer what may leave now."""
        while (found := self._flow.next(peer, time.monotonic())) is not None:
            (head, data), mark = found
            self._put_out(peer, BULK, seal(head, mark), data)

    def _put_out(self, peer: int, channel: int, head: bytes, data: memoryview) -> None:
        sock = self._out[peer, channel]
        self.counters.sent[peer] += HEADER_BYTES + data.nbytes
        if data.nbytes:
            sock.send(head, _MORE)
            sock.send(data, _NOBLOCK, copy=False)
        else:
            sock.send(head, _NOBLOCK)

    def close(self, timeout: float) -> None:
        if self._closed or self._forked:
            return
        self._flush_until = time.monotonic() + timeout
        self._stopping = True
        self.post(lambda: None)
        if self._thread is not None:
            self._thread.join(timeout + 5)
            if self._thread.is_alive():
                # Its sockets are in use: freeing them under its feet would crash the process.
                log.error("rank %d: the communication thread does not end", self.rank)
                return
        if self._auth is not None:
            self._auth.stop()
        # Monitors first fall silent, then close: libzmq's thread would block on one without a reader.
        for sock in (*self._in.values(), *self._out.values()):
            sock.disable_monitor()
        for sock in (*self._in_monitors.values(), *self._out_monitors.values(), *self._in.values()):
            sock.close(linger=0)
        left = max(0.0, self._flush_until - time.monotonic())
        for sock in self._out.values():
            sock.close(linger=int(left * 1000))
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
        self._closed = True

    def _after_fork(self) -> None:
        if self._closed:
            return
        self._forked = True
        close_inherited(self._own_ports, self._peer_ports)

    # --- endpoint's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Nothing may end this thread, or a part of its work, in silence."""
        log.debug("in the communication thread", exc_info=error)
        if self._handler is not None:
            self._handler.on_error(error)

    def _loop(self) -> None:
        # Connection events are not polled for: that would cost more than a message does, and WATCH_SECONDS do.
        poller = zmq.Poller()
        for sock in self._in.values():
            poller.register(sock, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        watch = 0.0
        while not self._stopping or self._posted or self._flushes():
            self._run_posted()
            more = [self._receive(channel) for channel in (URGENT, BULK)]
            if not any(more):
                self._asleep = True
                ready = dict(poller.poll(0 if self._posted else _POLL_MS))
                self._asleep = False
                if self._wake_in.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_in.recv(4096)
            now = time.monotonic()
            due = self._health.next_due()
            if now >= watch or (due is not None and now >= due):
                self._watch()
                self._report_lost()
                watch = now + WATCH_SECONDS

    def _flushes(self) -> bool:
        return self._flow.waiting and time.monotonic() < self._flush_until

    def _run_posted(self) -> None:
        while self._posted:
            try:
                self._posted.popleft()()
            except Exception as error:
                self._report(error)

    def _receive(self, channel: int) -> bool:
        """Take what has come; True: there may be more."""
        taken = 0
        for _ in range(BURST):
            try:
                frames = self._in[channel].recv_multipart(_NOBLOCK, copy=False)
            except zmq.Again:
                return False
            payload = frames[1].buffer if len(frames) == 2 else memoryview(b"")
            head = frames[0].buffer if len(frames) <= 2 else b""
            header = unpack(head, self._token, self.world_size, payload.nbytes)
            if header is None or header.rank == self.rank:
                self.counters.stranger_frames += 1
                continue
            self.counters.received[header.rank] += HEADER_BYTES + payload.nbytes
            self._on_message(header, payload, channel, frames[0])
            taken += payload.nbytes
            if taken >= BURST_BYTES:
                break
        return True

    def _on_message(self, header: Header, payload: memoryview, channel: int, head: zmq.Frame) -> None:
        rank = header.rank
        if header.kind is Kind.HELLO:
            self._hello(rank, channel, head)
            return
        if header.kind is Kind.RECEIPT:
            self._flow.confirm(rank, header.mark, time.monotonic())
            self._pump(rank)
            return
        if header.kind is Kind.BYE:
            self._health.bye(rank, channel)
            self._forget(rank)
        if self._handler is not None:
            try:
                self._handler.on_message(header, payload)
            except Exception as error:
                self._report(error)
        if header.mark:
            self.send(rank, Header(Kind.RECEIPT, self.rank, mark=header.mark), urgent=True)

    def _hello(self, rank: int, channel: int, frame: zmq.Frame) -> None:
        self._watch()  # the end of an earlier connection with the same file descriptor comes first
        self._health.hello(rank, channel, int(frame.get(zmq.SRCFD)))
        if not self._health.silent():
            self._greeted.set()

    def _watch(self) -> None:
        """Read the connection events: strangers that went away, peers whose connections broke."""
        now = time.monotonic()
        for channel, ear in self._in_monitors.items():
            for _, fd in heard(ear):
                self.counters.stranger_connections += not self._health.inbound_ended(channel, fd, now)
        for (peer, _), ear in self._out_monitors.items():
            for event, _ in heard(ear):
                # Before the handshake libzmq goes on trying; afterwards messages may have been lost.
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected.add(ear)
                elif ear in self._connected:
                    self._health.outbound_ended(peer, now)

    def _report_lost(self) -> None:
        for peer in self._health.lost(time.monotonic()):
            self._forget(peer)
            reason = "its connection was closed without a goodbye"
            if not self._greeted.is_set():
                self._lost_early = f"rank {peer} was lost: {reason}"
                self._greeted.set()
            if self._handler is not None:
                self._handler.on_lost(peer, reason)

    def _forget(self, peer: int) -> None:
        """Stop reconnecting to a peer that is gone: its port may be someone else's by now."""
        if peer not in self._health.gone:
            return
        self._flow.drop(peer)
        for channel in (BULK, URGENT):
            if where := self._urls.pop((peer, channel), None):
                with contextlib.suppress(zmq.ZMQError):
                    self._out[peer, channel].disconnect(where)
