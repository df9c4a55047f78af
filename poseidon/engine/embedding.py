"""Catching the touched rows of an embedding's gradient, as Linear layers' factors are caught (see ``capture``).

Each use of the weight records its distinct indices and, per index, the sum of the output's gradient: what the layer's
own backward computes, without the zeros of all other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from poseidon.engine.capture import attach, backward_mode, plain_state, recorder
from poseidon.engine.rows import Rows
from poseidon.errors import UserError
from poseidon.schemes import Touched, accumulator_dtype, sum_rows

Tensor = torch.Tensor
aten = torch.ops.aten
_MODES = {"sum": 0, "mean": 1, "max": 2}
_INTEGERS = (torch.int32, torch.int64)

# --- capture -------------------------------------------------------------------------------------------------------

#: (distinct indices, of each index that was looked up its place in them) -> [k, D], the sum of their gradients.
Sum = Callable[[Tensor, Tensor], Tensor]


class _RowsEmbedding(torch.autograd.Function):
    """Rows of w; backward records the rows of w's gradient and returns none for w."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, ids: Tensor, padding: int, counted: bool, sparse: bool, record: Rows) -> Tensor:
        # In 1-D, since an N-D result would be a view and forbid changing it in place.
        y: Tensor = aten.embedding(w, ids.reshape(-1), padding, counted, sparse)
        if ids.dim() != 1:
            y = aten._unsafe_view(y, (*ids.shape, w.shape[1]))
        ctx.save_for_backward(ids)
        ctx.size, ctx.options, ctx.record = w.shape[0], (padding, counted, sparse), record
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), (ids,), (padding, counted, sparse) = grads, ctx.saved_tensors, ctx.options
        gw = None
        mode = backward_mode(ctx.record)
        if mode == "dense":
            gw = aten.embedding_backward(g, ids, ctx.size, padding, counted, sparse)
        elif mode == "factors":
            g = g.reshape(-1, g.shape[-1])

            def total(distinct: Tensor, place: Tensor) -> Tensor:
                return sum_rows(g.to(accumulator_dtype(g.dtype)), place, len(distinct)).to(g.dtype)

            _record(ctx, ids.reshape(-1), g, total)
        return gw, None, None, None, None, None


class _RowsBag(torch.autograd.Function):
    """Bags of rows of w; backward records the rows of w's gradient and returns none for w."""

    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        factors: Tensor | None,
        ids: Tensor,
        offsets: Tensor,
        options: tuple[Any, ...],
        record: Rows,
    ) -> Tensor:
        padding, counted, sparse, mode, last = options
        y, *places = aten._embedding_bag(w, ids, offsets, counted, mode, sparse, factors, last, padding)
        needed = factors is not None and factors.requires_grad
        ctx.save_for_backward(ids, offsets, factors, w if needed else None, *places)
        ctx.size, ctx.options, ctx.mode, ctx.record = w.shape[0], options[:3], mode, record
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), (ids, offsets, factors, w, *places) = grads, ctx.saved_tensors
        padding, counted, sparse = ctx.options
        gw = gf = None
        if ctx.needs_input_grad[1]:
            gf = aten._embedding_bag_per_sample_weights_backward(g, w, ids, offsets, places[0], ctx.mode, padding)
        mode = backward_mode(ctx.record) if ctx.needs_input_grad[0] else "nothing"
        if mode == "dense":
            gw = aten._embedding_bag_backward(
                g, ids, offsets, *places, ctx.size, counted, ctx.mode, sparse, factors, padding
            )
        elif mode == "factors":

            def total(distinct: Tensor, place: Tensor) -> Tensor:
                """The layer's own backward, as if its weight had only the rows that were looked up."""
                bag_of, sizes, largest = places
                if ctx.mode == _MODES["max"]:
                    largest = torch.searchsorted(distinct, largest).clamp(max=len(distinct) - 1).to(largest.dtype)
                result: Tensor = aten._embedding_bag_backward(
                    g,
                    place.to(ids.dtype),
                    offsets,
                    bag_of,
                    sizes,
                    largest,
                    len(distinct),
                    False,
                    ctx.mode,
                    False,
                    factors,
                )
                return result

            _record(ctx, ids, g, total)
        return gw, gf, None, None, None, None


def _record(ctx: Any, ids: Tensor, g: Tensor, total: Sum) -> None:
    """Records one use: 1-D `ids` were looked up, and the output's gradient is `g`."""
    padding, counted, sparse = ctx.options
    if ids.is_meta:  # no values there: nothing can be told but how many
        ctx.record.add(Touched(ids, g.new_empty(len(ids), g.shape[-1])), len(ids))
        return
    distinct, place = torch.unique(ids, return_inverse=True)
    values = total(distinct, place)
    counts = torch.bincount(place, minlength=len(distinct)) if counted else None
    if padding >= 0:
        kept = distinct != padding
        distinct, values = distinct[kept], values[kept]
        counts = None if counts is None else counts[kept]
    ctx.record.add(Touched(distinct.long(), values.detach(), counts, strided=not sparse), len(ids))


def _forward_embedding(self: nn.Embedding, input: Tensor) -> Tensor:
    record = recorder(self, input)
    refused = self.scale_grad_by_freq and self.sparse  # by torch, in backward
    if record is None or refused or input.dtype not in _INTEGERS or self.max_norm is not None:
        return type(self).forward(self, input)
    padding = -1 if self.padding_idx is None else self.padding_idx
    result: Tensor = _RowsEmbedding.apply(record.weight, input, padding, self.scale_grad_by_freq, self.sparse, record)
    return result


def _forward_bag(
    self: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    record = recorder(self, *[t for t in (input, offsets, per_sample_weights) if t is not None])
    if record is None or not _usual(self, input, offsets, per_sample_weights):
        return type(self).forward(self, input, offsets, per_sample_weights)
    last = self.include_last_offset
    if offsets is None:
        offsets, last = (
            torch.arange(0, input.numel(), input.shape[1], dtype=input.dtype, device=input.device),
            False,
        )
    factors = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    padding = -1 if self.padding_idx is None else self.padding_idx
    options = (padding, self.scale_grad_by_freq, self.sparse, _MODES[self.mode], last)
    result: Tensor = _RowsBag.apply(record.weight, factors, input.reshape(-1), offsets, options, record)
    return result


def _usual(bag: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None, factors: Tensor | None) -> bool:
    """Arguments as they should be; others are for torch to complain of, or to convert."""
    return (
        input.dtype in _INTEGERS
        and not input.is_nested
        and input.numel() > 0
        and (input.dim() == 2 if offsets is None else input.dim() == offsets.dim() == 1)
        and (offsets is None or offsets.dtype == input.dtype)
        and bag.mode in _MODES
        and bag.max_norm is None
        and not (bag.mode == "max" and (bag.scale_grad_by_freq or bag.sparse))
        and (factors is None or (bag.mode == "sum" and factors.shape == input.shape))
    )


def _describe_bag(self: nn.EmbeddingBag) -> str:
    """An EmbeddingBag's repr has that of all in its ``__dict__``, and a method's repr has that of its owner."""
    return type(self).extra_repr(SimpleNamespace(**plain_state(self)))  # type: ignore[arg-type]


_RECORDING: dict[type[nn.Module], dict[str, Callable[..., Any]]] = {
    nn.Embedding: {"forward": _forward_embedding},
    nn.EmbeddingBag: {"forward": _forward_bag, "extra_repr": _describe_bag},
}


def can_record_rows(module: nn.Module) -> bool:
    """Exactly ``nn.Embedding`` or ``nn.EmbeddingBag`` with a plain weight of its own, in row-major order."""
    weight = module._parameters.get("weight")
    return type(module) in _RECORDING and type(weight) is nn.Parameter and weight.is_contiguous() and weight.numel() > 0


def attach_rows(module: nn.Module, record: Rows) -> None:
    """Let an embedding record into `record` until that is closed."""
    record.counted |= bool(module.scale_grad_by_freq)
    record.sparse &= bool(module.sparse)
    attach(module, record, **_RECORDING[type(module)])


# --- what cannot be as in one process ------------------------------------------------------------------------------


def refuse(model: nn.Module, capture: bool) -> None:
    """Embeddings that no exchange of gradients makes equal to one process.

    Args:
        capture: can gradients be caught as rows?

    Raises:
        UserError: names the layer and the remedy.
    """
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        name = path or "(root)"
        if module.max_norm is not None:
            raise UserError(
                f"layer {name}: max_norm shrinks rows of the weight during forward, on each rank only those that it "
                "looks up, so replicas would drift apart: set it to None and call weight.data.renorm_(p, 0, max_norm) "
                "after each optimizer.step()"
            )
        trained = any(p.requires_grad for p in module.parameters())
        if module.scale_grad_by_freq and trained and not (capture and can_record_rows(module)):
            raise UserError(
                f"layer {name}: scale_grad_by_freq needs how often each row was looked up on all ranks, which only a "
                "plain nn.Embedding or nn.EmbeddingBag with a weight of its own can tell: set it to False"
            )


def not_counted(layer: str, weight: str) -> UserError:
    """The gradient of a weight under scale_grad_by_freq came otherwise than from lookups that were recorded."""
    return UserError(
        f"layer {layer or '(root)'}: scale_grad_by_freq divides gradients by how often rows were looked up on all "
        f"ranks, but {weight} also has a gradient from elsewhere (another layer or function, a penalty on it, "
        "torch.compile, create_graph or a hook on the weight): set scale_grad_by_freq=False or give that use "
        "a weight of its own"
    )
