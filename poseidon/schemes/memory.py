"""Tensors as bytes and back, without copies."""

from __future__ import annotations

import torch

#: Memory that arrives from a socket may be aligned less than a tensor's elements need.
_ALIGNED = 16


def raw(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor of any dtype; shares its memory."""
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.detach().view(torch.uint8).numpy().data)


def from_bytes(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor over received bytes; copies only if they are not aligned."""
    if data.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % _ALIGNED and flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def storage_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """1-D view of a non-overlapping dense tensor in the order of its memory (channels_last included).

    None if the tensor has holes or overlaps.
    """
    if tensor.layout != torch.strided:
        return None
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted((st, n) for n, st in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
