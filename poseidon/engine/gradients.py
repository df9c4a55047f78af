"""From ``p.grad`` and recorded factors to a unit's contribution, and from its result back to ``p.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from poseidon.engine.capture import Record, product
from poseidon.planning import Book, FactorSize, Unit
from poseidon.schemes import Contribution, reconstruct, storage_order


class Gradients:
    """Buffers of one plan.

    A merged unit's values are gathered in a staging buffer. Factors are copied into one of two buffers in
    turn: a peer that contributes to round t + 1 has everything of round t, so what was sent in round t may be
    overwritten in round t + 2 (and a staging buffer, whose result came back, in round t + 1).
    """

    def __init__(self, book: Book, params: Sequence[nn.Parameter], records: dict[int, Record]) -> None:
        self._book = book
        self._params = params
        self._records = records
        self._staging: dict[int, torch.Tensor] = {}
        self._factors: dict[tuple[int, int], torch.Tensor] = {}
        for unit in book.units:
            if unit.merged:
                self._staging[unit.index] = torch.zeros(unit.numel, dtype=params[unit.params[0]].dtype)

    def settle(self, index: int) -> FactorSize | None:
        """All uses of a parameter are in. What cannot leave as factors becomes a dense ``p.grad``.

        Returns:
            The factors' size if they alone make up the gradient.
        """
        record = self._records.get(index)
        if record is None or not record.factors:
            return None
        p = self._params[index]
        size = FactorSize(sum(u.shape[0] for u, _ in record.factors), record.factors[0][0].itemsize)
        # zero_grad(set_to_none=False) leaves zeros: nothing that the factors do not say.
        pure = p.grad is None or not bool(p.grad.any())
        if pure and self._book.units[self._book.unit_of[index]].scheme == "sfb":
            return size
        factors, record.factors = record.factors, []
        for u, v in factors:
            part = product(u, v, p.dtype)
            if p.grad is None:
                p.grad = part
            elif p.grad.requires_grad:  # create_graph
                p.grad = p.grad + part
            else:
                p.grad.add_(part)  # in place, as autograd does: it may be a view of a user's flat buffer
        return size if pure else None

    def contribution(self, unit: Unit, round_: int, rows: int) -> Contribution:
        if unit.merged:
            return self._merged(unit, rows)
        index = unit.params[0]
        record = self._records.get(index)
        if record is not None and record.factors:
            return self._factored(unit, record, round_, rows)
        return Contribution(rows, dense=self._flat_grad(self._params[index]))

    def _factored(self, unit: Unit, record: Record, round_: int, rows: int) -> Contribution:
        """u and v, each [k, ...] of all uses, copied side by side: u's rows first, then v's."""
        factors, record.factors = record.factors, []
        k = sum(u.shape[0] for u, _ in factors)
        m, n = self._params[unit.params[0]].shape
        buffer = self._buffer(unit, round_, k * (m + n), factors[0][0].dtype)
        u_all, v_all = buffer[: k * m].view(k, m), buffer[k * m :].view(k, n)
        row = 0
        for u, v in factors:
            u_all[row : row + u.shape[0]].copy_(u)
            v_all[row : row + u.shape[0]].copy_(v)
            row += u.shape[0]
        return Contribution(rows, factors=buffer, k=k)

    def _buffer(self, unit: Unit, round_: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        key = (unit.index, round_ % 2)
        buffer = self._factors.get(key)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype:
            buffer = self._factors[key] = torch.empty(numel, dtype=dtype)
        return buffer[:numel]

    def _flat_grad(self, p: nn.Parameter) -> torch.Tensor | None:
        """``p.grad`` in the order of the parameter's memory, sharing memory with ``p.grad``."""
        grad = p.grad
        if grad is None:
            return None
        if grad.layout == torch.strided and grad.stride() == p.stride():
            flat = storage_order(grad.detach())
            if flat is not None:
                return flat
        dense = torch.empty_like(p)
        dense.copy_(grad.detach().to_dense())
        if grad.layout == torch.strided:
            p.grad = dense
        flat = storage_order(dense)
        return dense.contiguous().view(-1) if flat is None else flat

    def _merged(self, unit: Unit, rows: int) -> Contribution:
        staging = self._staging[unit.index]
        flags = staging[unit.numel - len(unit.params) :]
        flags.zero_()
        offset = 0
        for slot, index in enumerate(unit.params):
            p = self._params[index]
            place = staging[offset : offset + p.numel()]
            offset += p.numel()
            if p.grad is None:
                place.zero_()
                continue
            place.copy_(self._flat_grad(p))  # type: ignore[arg-type]
            flags[slot] = 1
        return Contribution(rows, dense=staging)

    def apply(self, unit: Unit, result: Any) -> None:
        """Write a unit's global gradient to ``p.grad``; None where no rank has one."""
        if unit.scheme == "sfb":
            p = self._params[unit.params[0]]
            self._assign(p, reconstruct(result, p.shape, p.dtype))
        elif not unit.merged:
            self._assign(self._params[unit.params[0]], result)
        elif result is not None:
            self._split(unit, result)
        else:
            for index in unit.params:
                self._params[index].grad = None

    def _split(self, unit: Unit, staging: torch.Tensor) -> None:
        flags = staging[unit.numel - len(unit.params) :].tolist()
        offset = 0
        for index, flag in zip(unit.params, flags, strict=True):
            p = self._params[index]
            values = staging[offset : offset + p.numel()]
            offset += p.numel()
            self._assign(p, values.clone() if flag and p.grad is None else values if flag else None)

    def _assign(self, p: nn.Parameter, flat: torch.Tensor | None) -> None:
        """`flat` is in the order of the parameter's memory; memory that is ``p.grad`` already stays."""
        if flat is None:
            p.grad = None
            return
        grad = p.grad
        value = _shaped(flat, p)
        if grad is None:
            p.grad = value
        elif grad.layout != torch.strided:
            p.grad = value.to_sparse(grad.sparse_dim())
        elif grad.data_ptr() != flat.data_ptr() or grad.numel() == 0:
            with torch.no_grad():
                grad.copy_(value)


def _shaped(flat: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    if flat.shape == p.shape:
        return flat
    if p.is_contiguous() or storage_order(p.detach()) is None:
        return flat.view(p.shape)
    return torch.as_strided(flat, p.shape, p.stride(), flat.storage_offset())
