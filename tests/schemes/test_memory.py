from __future__ import annotations

import warnings

import pytest
import torch

from poseidon.schemes import raw, storage_order
from poseidon.schemes.memory import from_bytes

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", range(17))
def test_bytes_at_any_address(dtype, shift):
    values = torch.arange(7).to(dtype)
    memory = bytearray(shift + 7 * dtype.itemsize)
    memory[shift:] = raw(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = from_bytes(memoryview(memory)[shift:], dtype)
    assert torch.equal(result, values)
    assert result.data_ptr() % dtype.itemsize == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_a_tensor_too(dtype):
    empty = torch.empty(0, dtype=dtype)
    assert raw(empty).nbytes == 0
    assert from_bytes(raw(empty), dtype).shape == (0,)


def test_raw_shares_memory():
    tensor = torch.zeros(4, requires_grad=True)
    view = raw(tensor)
    assert view.nbytes == 16
    view[0:4] = b"\x00\x00\x80\x3f"
    assert tensor.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(()),
        torch.randn(5),
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(10)[2:7],
        torch.randn(1, 5)[:, :],
        torch.randn(0, 3),
        torch.randn(3, 0).t(),
    ],
)
def test_storage_order(tensor):
    flat = storage_order(tensor)
    assert flat is not None
    assert flat.shape == (tensor.numel(),)
    assert flat.is_contiguous()
    assert torch.equal(torch.as_strided(flat, tensor.shape, tensor.stride(), flat.storage_offset()), tensor)
    if tensor.numel():
        assert flat.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 4)[:, :2], torch.randn(10)[::2], torch.randn(1, 4).expand(3, 4), torch.randn(3, 3).to_sparse()],
)
def test_holes_and_overlaps_have_none(tensor):
    assert storage_order(tensor) is None
