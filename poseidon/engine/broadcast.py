"""Tensors of one rank to the others, outside of rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.engine.exchange import Exchange
from poseidon.schemes import raw, storage_order
from poseidon.transport import Header, Kind

#: Mailbox tags of tensors. From the last one on they number the broadcasts.
TAG_BUFFERS, TAG_LIVE, TAG_TENSORS = 1, 2, 16
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
    messages = []
    for index, tensor in enumerate(tensors):
        data = raw(_flat(tensor))
        for offset in range(0, data.nbytes, _PIECE):
            header = Header(Kind.STATE, exchange.rank, model, unit=tag, round=index, offset=offset, total=data.nbytes)
            messages.append((header, bytes(data[offset : offset + _PIECE])))

    def send() -> None:
        for header, piece in messages:
            for peer in peers:
                exchange.endpoint.send(peer, header, piece)

    exchange.endpoint.post(send)


@torch.no_grad()
def take(exchange: Exchange, model: int, tag: int, tensors: Sequence[torch.Tensor], what: str, source: int = 0) -> None:
    """Wait for what ``source`` gives, and write it to ``tensors``."""
    for index, tensor in enumerate(tensors):
        flat = _flat(tensor)
        target = raw(flat)
        got = 0
        while got < target.nbytes:
            header, payload = exchange.receive(Kind.STATE, source, model, tag, what)
            assert header.round == index
            target[header.offset : header.offset + header.length] = payload.cast("B")
            got += header.length
        if flat.data_ptr() != tensor.data_ptr() or not tensor.is_cpu:
            tensor.copy_(flat.view_as(tensor))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    flat = storage_order(tensor) if tensor.is_cpu else None
    return flat if flat is not None else tensor.contiguous().cpu().view(-1)
