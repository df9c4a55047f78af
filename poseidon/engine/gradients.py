"""From ``p.grad`` and recorded factors to a unit's contribution, and from its result back to ``p.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from poseidon.engine.capture import Factors, Record
from poseidon.engine.device import Device
from poseidon.engine.embedding import not_counted
from poseidon.engine.rows import Rows, as_sparse
from poseidon.engine.streams import Streams
from poseidon.planning import Book, FactorSize, Unit
from poseidon.schemes import Contribution, Touched, combine, depth_of, shaped, storage_order


class Merged(NamedTuple):
    """A merged unit's result.

    Attributes:
        values: [unit.numel] the parameters' gradients, one after the other, and their flags.
        flags: the same flags, on the host: by parameter, not 0 if any rank has a gradient.
    """

    values: torch.Tensor
    flags: list[float]


class Gradients:
    """Buffers of one plan, on the device that gradients are made on.

    A merged unit's values are gathered in a staging buffer, factors are copied into one; each has `depth` of them in
    turn. With staleness s a peer that contributes to round t + 1 + s has everything of round t, so what was sent in
    round t may be overwritten `depth` = 2 + 2s rounds later (see Average).

    Args:
        counted: non-zeros of factors are, where these become gradients before they leave.

    Attributes:
        params: whose gradients these are.

    With staleness a dense gradient is copied: it is under way while the user may write to memory that was given to
    ``p.grad`` by hand (views of one flat buffer).
    """

    def __init__(
        self,
        book: Book,
        params: Sequence[nn.Parameter],
        records: dict[int, Record],
        device: Device,
        depth: int,
        *,
        counted: bool,
    ) -> None:
        self._device = device
        self._book = book
        self.params = params
        self._depth = depth
        self._keeps = depth > depth_of(0)  # results come after the round has closed
        self._records = records
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}  # by unit and turn
        self._rows: dict[int, Touched | torch.Tensor | None] = {}  # settled, but not sent
        self._streams = Streams()  # on which gradients were settled
        self._like = [_like(p) for p in params]
        self._counted = counted
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of non-zeros in u, v, where the factors are

    def settle(self, index: int) -> FactorSize | None:
        """All uses of a parameter are in. What cannot leave as factors becomes a dense ``p.grad``.

        Returns:
            The factors' size if they alone make up the gradient.

        Raises:
            UserError: scale_grad_by_freq on a weight whose gradient does not come from lookups alone.
        """
        record = self._records.get(index)
        self._streams.note(self.params[index])
        if isinstance(record, Rows):
            return self._settle_rows(index, record)
        if not isinstance(record, Factors) or not record.factors:
            return None
        p = self.params[index]
        size = FactorSize(sum(u.shape[0] for u, _ in record.factors), record.factors[0][0].itemsize)
        # zero_grad(set_to_none=False) leaves zeros: nothing that the factors do not say. Looking at them waits for the
        # device; at what micro-batches have accumulated it need not look.
        pure = p.grad is None or not (record.given or bool(p.grad.any()))
        record.given = False
        if pure and self._scheme(index) in ("sfb", "adam", "block"):
            return size
        if pure and self._counted:
            self._counts[index] = self._non_zeros(record)
        part = record.spend(None)
        assert part is not None
        if p.grad is None:
            p.grad = part
        elif p.grad.requires_grad:  # create_graph
            p.grad = p.grad + part
        else:
            p.grad.add_(part)  # in place, as autograd does: it may be a view of a user's flat buffer
        return size if pure else None

    def _non_zeros(self, record: Factors) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers on the device, which nobody waits for yet."""
        u, v = zip(*record.factors, strict=True)
        return sum(map(torch.count_nonzero, u), torch.tensor(0)), sum(map(torch.count_nonzero, v), torch.tensor(0))

    def with_shares(self, sizes: Mapping[str, FactorSize]) -> dict[str, FactorSize]:
        """The sizes of a round by PS, with the shares of non-zeros. Waits for the device."""
        result = dict(sizes)
        for index, counts in self._counts.items():
            param = self._book.params[index]
            size = result.get(param.name)
            if size is not None and size.rows:
                u, v = (int(n) / (size.rows * side) for n, side in zip(counts, param.shape, strict=True))
                result[param.name] = size._replace(u=u, v=v)
        return result

    def _settle_rows(self, index: int, record: Rows) -> FactorSize | None:
        """An embedding; its size is that of all rows that are not zero, wherever they come from."""
        p, info = self.params[index], self._book.params[index]
        if record.counted and record.mixed:
            raise not_counted(info.layer, info.name)
        by_rows = self._scheme(index) == "rows"
        if not by_rows and not record.active:  # as decided: nothing was recorded, or before the decision
            if record.factors:
                _write(p, record.gather(p.grad))
            return None
        found = record.gather(p.grad)
        if by_rows:
            self._rows[index] = found
        else:
            _write(p, found)
        if isinstance(found, torch.Tensor):
            return None
        return FactorSize(0 if found is None else found.indices.numel(), p.itemsize)

    def _scheme(self, index: int) -> str:
        return self._book.units[self._book.unit_of[index]].scheme

    def altered(self, indices: Iterable[int] | None = None) -> str | None:
        """Name of a parameter (of these) that is another in type, shape or order in memory than this plan's; None:
        none is."""
        for index in range(len(self.params)) if indices is None else indices:
            if _like(self.params[index]) != self._like[index]:
                return self._book.params[index].name
        return None

    def found(self) -> bool:
        """Is there any gradient that is not zero, of what has not been sent yet? A device is waited for. Only asked
        where the rows of a step are not known otherwise."""
        return (
            any(record.factors for record in self._records.values())
            or any(rows is not None for rows in self._rows.values())
            or any(p.grad is not None and (p.grad.is_sparse or bool(p.grad.any())) for p in self.params)
        )

    def contribution(self, unit: Unit, round_: int, rows: int) -> Contribution:
        self._streams.join()
        if unit.merged:
            return self._merged(unit, round_, rows)
        index = unit.params[0]
        if unit.scheme == "rows":
            found = self._rows.pop(index)
            if isinstance(found, Touched):
                return Contribution(rows, touched=found)
            return Contribution(rows, dense=None if found is None else found.view(-1))
        record = self._records.get(index)
        if isinstance(record, Factors) and record.factors:
            return self._factored(unit, record, round_, rows)
        dense = self._flat_grad(self.params[index])
        if dense is not None and self._keeps and self._device.has_values:
            dense = dense.clone()
        return Contribution(rows, dense=dense)

    def _factored(self, unit: Unit, record: Factors, round_: int, rows: int) -> Contribution:
        """u and v, each [k, ...] of all uses, copied side by side: u's rows first, then v's.

        -0.0, of which dropout makes many, becomes 0.0: what is sent is smaller for it, and this rank multiplies what
        all others do.
        """
        factors = record.take()
        k = sum(u.shape[0] for u, _ in factors)
        m, n = self.params[unit.params[0]].shape
        buffer = self._buffer(unit, round_, k * (m + n), factors[0][0])
        u_all, v_all = buffer[: k * m].view(k, m), buffer[k * m :].view(k, n)
        row = 0
        for u, v in factors:
            torch.add(u, 0, out=u_all[row : row + u.shape[0]])
            torch.add(v, 0, out=v_all[row : row + u.shape[0]])
            row += u.shape[0]
        return Contribution(rows, factors=buffer, k=k)

    def _buffer(self, unit: Unit, round_: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        key = (unit.index, round_ % self._depth)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel or buffer.dtype != like.dtype:
            buffer = self._buffers[key] = like.new_empty(numel)
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

    def _merged(self, unit: Unit, round_: int, rows: int) -> Contribution:
        staging = self._buffer(unit, round_, unit.numel, self.params[unit.params[0]].detach())
        flags = staging[unit.numel - len(unit.params) :].fill_(1)
        offset = 0
        for slot, index in enumerate(unit.params):
            p = self.params[index]
            place = staging[offset : offset + p.numel()]
            offset += p.numel()
            if p.grad is None:
                place.zero_()
                flags[slot].zero_()
                continue
            place.copy_(self._flat_grad(p))  # type: ignore[arg-type]
        return Contribution(rows, dense=staging)

    def multiply(self, unit: Unit, contributions: Sequence[Contribution], rows: range | None = None) -> Any:
        """A weight's averaged gradient, or only `rows` of it, from all ranks' factors; None if no rank has one."""
        p = self.params[unit.params[0]]
        name = self._book.params[unit.params[0]].name
        return self._device.reconstruct(name, contributions, p.shape, p.dtype, rows)

    def apply(self, unit: Unit, result: Any) -> None:
        """Write a unit's global gradient to ``p.grad``; None where no rank has one. All units have left by then."""
        self._streams.clear()
        if unit.scheme == "sfb" and isinstance(result, list):
            self._assign(self.params[unit.params[0]], self.multiply(unit, result))
        elif unit.scheme == "rows":
            p = self.params[unit.params[0]]
            _write(p, self._device.place(combine(result, p.shape, p.dtype)))
        elif not unit.merged:
            self._assign(self.params[unit.params[0]], result, self._sparse(unit.params[0]))
        elif result is not None:
            self._split(unit, result)
        else:
            for index in unit.params:
                self.params[index].grad = None

    def _split(self, unit: Unit, result: Merged) -> None:
        offset = 0
        for index, flag in zip(unit.params, result.flags, strict=True):
            p = self.params[index]
            values = result.values[offset : offset + p.numel()]
            offset += p.numel()
            self._assign(
                p, values.clone() if flag and p.grad is None else values if flag else None, self._sparse(index)
            )

    def _sparse(self, index: int) -> bool:
        """Are gradients sparse where nothing says otherwise?"""
        record = self._records.get(index)
        return isinstance(record, Rows) and record.sparse

    def _assign(self, p: nn.Parameter, flat: torch.Tensor | None, sparse: bool = False) -> None:
        """`flat` is in the order of the parameter's memory; memory that is ``p.grad`` already stays."""
        if flat is None:
            p.grad = None
            return
        grad = p.grad
        value = shaped(flat, p)
        if grad is None:
            p.grad = value.to_sparse(1) if sparse else value
        elif grad.layout != torch.strided:
            p.grad = value.to_sparse(grad.sparse_dim())
        elif grad.data_ptr() != flat.data_ptr() or grad.numel() == 0:
            with torch.no_grad():
                grad.copy_(value)


def _like(p: torch.Tensor) -> tuple[object, ...]:
    return p.dtype, p.shape, p.stride()


@torch.no_grad()
def _write(p: nn.Parameter, result: Touched | torch.Tensor | None) -> None:
    """An embedding's gradient to ``p.grad``, whose memory stays where it is strided and stays so."""
    grad = p.grad if p.grad is not None and p.grad.layout == torch.strided else None
    if result is None:
        p.grad = None
    elif isinstance(result, Touched) and not result.strided:
        p.grad = as_sparse(result, p.shape)
    elif isinstance(result, Touched):
        grad = torch.zeros_like(p) if grad is None else grad.zero_()
        grad[result.indices] = result.values
        p.grad = grad
    else:
        p.grad = result if grad is None else grad.copy_(result)
