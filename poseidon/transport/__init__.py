"""The mesh that carries bytes between ranks: frames, byte counters, peer health. Knows nothing of layers."""

from poseidon.transport.addresses import is_loopback
from poseidon.transport.base import Counters, Endpoint, Handler
from poseidon.transport.frames import TOKEN_BYTES, Header, Kind
from poseidon.transport.inproc import InprocEndpoint, inproc_mesh
from poseidon.transport.owner import Owner
from poseidon.transport.zeromq import MAX_PAYLOAD, ZmqEndpoint

__all__ = [
    "MAX_PAYLOAD",
    "TOKEN_BYTES",
    "Counters",
    "Endpoint",
    "Handler",
    "Header",
    "InprocEndpoint",
    "Kind",
    "Owner",
    "ZmqEndpoint",
    "inproc_mesh",
    "is_loopback",
]
