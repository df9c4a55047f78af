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
    flat = torch.frombuffer(data, dtype=dtype)
    if flat.data_ptr() % _ALIGNED and flat.data_ptr() % dtype.itemsize:
        flat = torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype)
    return flat


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


def in_order(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of ``value``, of the shape of ``like``, in the order of that one's memory (or row by row, if it has
    holes); 1-D, shares memory where it can."""
    value = value.detach().to_dense()
    if storage_order(like.detach()) is not None and value.stride() != like.stride():
        value = torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
    flat = storage_order(value)
    return value.contiguous().view(-1) if flat is None else flat


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`in_order`, sharing the memory of ``flat``."""
    if flat.shape == like.shape:
        return flat
    if like.is_contiguous() or storage_order(like.detach()) is None:
        return flat.view(like.shape)
    return torch.as_strided(flat, like.shape, like.stride(), flat.storage_offset())


def autocast_device(tensor: torch.Tensor) -> str:
    """Where autocast is asked about; it does not know the meta device, on which plans are made."""
    return "cpu" if tensor.is_meta else tensor.device.type
