"""What libzmq tells of a socket's connections."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message


def monitor(context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that hears of these events on `sock`."""
    where = f"inproc://monitor-{sock.FD}"
    sock.monitor(where, events)
    ear: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    ear.setsockopt(zmq.RCVHWM, 0)  # a full one would block libzmq's own thread
    ear.connect(where)
    return ear


def heard(ear: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """Events since the last time, each with its value."""
    result = []
    while ear.poll(0):
        message = recv_monitor_message(ear)
        result.append((message["event"], message["value"]))
    return result
