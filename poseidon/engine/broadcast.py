"""Tensors of one rank to the others, outside of rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch

from poseidon.engine.exchange import Exchange
from poseidon.schemes import raw, storage_order
from poseidon.transport import Header, Kind

#: Mailbox tags of tensors. From the last one on they number the broadcasts.
TAG_BUFFERS, TAG_LIVE, TAG_SLICES, TAG_RATES, TAG_TENSORS = 1, 2, 3, 4, 16
_PIECE = 4 * 1024 * 1024


def broadcast(
    exchange: Exchange, model: int, tag: int, tensors: Sequence[torch.Tensor], what: str, source: int = 0
) -> None:
    """Everyone takes the values of rank ``source``, in place. Collective; the source does not wait for the others."""
    if exchange.rank == source:
        give(exchange, model, tag, tensors, [peer for peer in range(exchange.world_size) if peer != source])
    else:
        take(exchange, model, tag, tensors, what, source)
        exchange.empty(Kind.STATE, source, model, tag)


@torch.no_grad()
def give(exchange: Exchange, model: int, tag: int, tensors: Sequence[torch.Tensor], peers: Sequence[int]) -> None:
    """Send copies, as one: training may go on and change the tensors, and another set of them may follow."""
    _post(exchange, Header(Kind.STATE, exchange.rank, model, unit=tag), [_flat(tensor) for tensor in tensors], peers)


@torch.no_grad()
def give_named(
    exchange: Exchange, model: int, tag: int, tensors: Mapping[str, torch.Tensor], peers: Sequence[int], number: int = 0
) -> None:
    """Like :func:`give`, for takers that may have other tensors by then. ``number`` comes back from `take_named`."""
    shown = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    about = json.dumps([[name, str(t.dtype), list(t.shape)] for name, t in shown.items()]).encode()
    begin = torch.frombuffer(bytearray(len(about).to_bytes(8, "little") + about), dtype=torch.uint8)
    flats = [begin, *(on_host(tensor).contiguous().view(-1) for tensor in shown.values())]
    _post(exchange, Header(Kind.STATE, exchange.rank, model, unit=tag, k=number), flats, peers)


def take_named(
    exchange: Exchange, model: int, tag: int, what: str, source: int = 0
) -> tuple[int, dict[str, torch.Tensor]]:
    """Wait for what ``source`` gives by `give_named`: its number, and tensors on the host."""
    header, piece = exchange.receive(Kind.STATE, source, model, tag, what)
    data = bytearray(piece)
    while len(data) < header.total:
        data += exchange.receive(Kind.STATE, source, model, tag, what)[1]
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, dtype, shape in json.loads(data[8:start]):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        raw(tensor.view(-1))[:] = memoryview(data)[start : start + tensor.nbytes]
        tensors[name] = tensor
        start += tensor.nbytes
    return header.k, tensors


def _post(exchange: Exchange, header: Header, flats: Sequence[torch.Tensor], peers: Sequence[int]) -> None:
    total = sum(flat.nbytes for flat in flats)
    messages = [
        (header._replace(offset=index * _PIECE, total=total), piece) for index, piece in enumerate(_pieces(flats))
    ]

    def send() -> None:
        for header, piece in messages:
            for peer in peers:
                exchange.endpoint.send(peer, header, piece)

    exchange.endpoint.post(send)


def _pieces(flats: Sequence[torch.Tensor]) -> Iterator[bytearray]:
    """All tensors' bytes, one after the other: thousands of small ones do not cost a message each."""
    piece = bytearray()
    for data in map(raw, flats):
        while data.nbytes:
            part = data[: _PIECE - len(piece)]
            piece += part
            data = data[part.nbytes :]
            if len(piece) == _PIECE:
                yield piece
                piece = bytearray()
    if piece:
        yield piece


@torch.no_grad()
def take(exchange: Exchange, model: int, tag: int, tensors: Sequence[torch.Tensor], what: str, source: int = 0) -> None:
    """Wait for what ``source`` gives, and write it to ``tensors``."""
    got, piece = 0, memoryview(b"")
    for tensor in tensors:
        flat = _flat(tensor)
        target = raw(flat)
        while target.nbytes:
            if not piece.nbytes:
                header, payload = exchange.receive(Kind.STATE, source, model, tag, what)
                assert header.offset == got
                piece = payload.cast("B")
                got += piece.nbytes
            part = piece[: target.nbytes]
            target[: part.nbytes] = part
            target, piece = target[part.nbytes :], piece[part.nbytes :]
        own = storage_order(tensor.detach())
        if own is None:
            tensor.copy_(flat.view_as(tensor))
        elif flat.data_ptr() != own.data_ptr():
            own.copy_(flat)
    assert not piece.nbytes


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, in the order of the tensor's memory where it has one."""
    flat = storage_order(tensor.detach())
    return on_host(tensor.contiguous().view(-1) if flat is None else flat)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values, after all that the device was given up to now, on whichever stream and by whichever thread."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor.detach().cpu()
