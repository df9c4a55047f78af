"""The touched rows of one embedding's gradient, as recorded, and as they are merged with what else there is."""

from __future__ import annotations

import torch
from torch import nn

from poseidon.engine.capture import Record
from poseidon.schemes import Touched, merge

Tensor = torch.Tensor


class Rows(Record):
    """What the uses of one embedding's weight recorded in the current backward passes.

    Attributes:
        factors: a Touched per use, in the order of the backward pass.
        counted: a layer with this weight has scale_grad_by_freq. Then all passes are recorded, also under no_sync().
        sparse: all layers with this weight have sparse=True.
        mixed: something that is no recorded use gave the weight a gradient since the last ``gather``.
        looked_up: indices so far, equal ones counted as often as they came.
    """

    factors: list[Touched]

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight)
        self.counted = False
        self.sparse = True
        self.mixed = False
        self.looked_up = 0

    def usable(self, weight: object) -> bool:
        return (self.active or self.counted) and self.fits(weight)

    def _travels(self) -> bool:
        return self.counted or super()._travels()

    def _merge(self, grad: Tensor | None) -> Tensor | None:
        self.mixed = self.mixed or (grad is not None and self._accumulates())
        return super()._merge(grad)

    def _accumulates(self) -> bool:
        """In backward(), that is, not in autograd.grad()."""
        try:
            return bool(torch._C._will_engine_execute_node(self.node()))
        except RuntimeError:
            return False

    def add(self, touched: Touched, looked_up: int) -> None:
        self.factors.append(touched)
        self.streams.note(touched.values)
        self.looked_up += looked_up

    def take(self) -> list[Touched]:
        """All that is recorded, which is recorded no longer, for the present stream."""
        uses, self.factors = self.factors, []
        self.streams.join(t for use in uses for t in (use.indices, use.values, use.counts) if t is not None)
        self.streams.clear()
        return uses

    def spend(self, grad: Tensor | None) -> Tensor:
        """`grad` with everything recorded in it. Of counts nothing is known here: who sees them comes by ``gather``."""
        uses = self.take()
        if all(not use.strided for use in uses) and (grad is None or grad.layout != torch.strided):
            parts = [_of_sparse(grad)] if grad is not None else []
            return as_sparse(merge([*parts, *uses], divide=True), self.weight.shape)
        result = torch.zeros_like(self.weight) if grad is None else grad.detach().to_dense().clone()
        for use in uses:
            result.index_add_(0, use.indices, use.values)
        return result

    def gather(self, grad: Tensor | None) -> Touched | Tensor | None:
        """All of this round, which is no longer recorded then.

        Args:
            grad: what ``p.grad`` holds already.

        Returns:
            The touched rows; a dense gradient, where its rows that are not zero would be no smaller; None if there is
            no gradient.
        """
        uses, self.mixed = self.take(), False
        if grad is None:
            return self._together(uses) if uses else None
        grad = grad.detach()
        if grad.layout != torch.strided:
            return self._together([_of_sparse(grad), *uses])
        indices = (grad != 0).any(1).nonzero().view(-1)
        v, d = grad.shape
        if indices.numel() * (d + 1) >= v * d and not self.counted:
            self.factors = uses
            return self.spend(grad) if uses else grad
        return self._together([Touched(indices, grad[indices]), *uses])

    def _together(self, parts: list[Touched]) -> Touched:
        numbered = [
            part
            if part.counts is None
            else Touched(part.indices, part.values, part.counts, torch.full_like(part.counts, number), part.strided)
            for number, part in enumerate(parts)
        ]
        return numbered[0] if len(numbered) == 1 else merge(numbered)


def _of_sparse(grad: Tensor) -> Touched:
    grad = grad.coalesce()
    return Touched(grad.indices()[0], grad.values(), strided=False)


def as_sparse(touched: Touched, shape: torch.Size) -> Tensor:
    """A coalesced sparse gradient."""
    return torch.sparse_coo_tensor(
        touched.indices.unsqueeze(0), touched.values, shape, is_coalesced=True, check_invariants=False
    )
