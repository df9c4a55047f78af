"""Catching sufficient factors: a Linear layer records (u, v) instead of multiplying them.

The layer's weight then receives no gradient from this use, and its AccumulateGrad node still runs once all
uses are done: that is where the engine looks at what came (factors, a dense gradient from other uses, both,
neither). So an irregular model needs no detection to be right: it is merged, and goes dense.

Everything semi-private that this leans on is tried once by :func:`self_test`; without it the engine goes dense.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd import forward_ad as fwad
from torch.autograd.graph import get_gradient_edge

from poseidon.engine.streams import Streams
from poseidon.schemes import autocast_device
from poseidon.transport import Owner

Tensor = torch.Tensor

#: By layer, where it records.
_RECORDS: WeakKeyDictionary[nn.Module, Record] = WeakKeyDictionary()
#: What stands in layers' ``__dict__`` in place of methods of their class.
_STAND_INS: set[Callable[..., Any]] = set()


class Record:
    """What the uses of one weight recorded in the current backward passes, instead of a gradient.

    Forward passes of before a change (of plan, of parameters, of the end) may have their backward pass after it, or be
    computed again in it (checkpoints). So what happens to the gradient is decided in backward, and what a forward pass
    leaves for backward is, tensor by tensor, what the layer's own would.

    Attributes:
        factors: one entry per use, in the order of the backward pass.
        active: False: the gradient travels as such under the present plan, and the layer computes natively.
        paused: gradients only accumulate for now (no_sync).
        given: a use of it gave a real gradient since `settle`.
        streams: on which uses were recorded.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.factors: list[Any] = []
        self.active = True
        self.paused = False
        self.given = False
        self.streams = Streams()
        self._closed = False
        self._detach: list[Callable[[], None]] = []
        self._owner = Owner()
        self._node: tuple[Any, Any] | None = None
        self.handle = weight.register_hook(self._merge)

    def spend(self, grad: Tensor | None) -> Tensor | None:
        """`grad` with all that is recorded in it, which is recorded no longer."""
        raise NotImplementedError

    def _merge(self, grad: Tensor | None) -> Tensor | None:
        """Tensor hook of the weight: all uses are summed. A dense part takes the factors in."""
        return None if grad is None or not self.factors else self.spend(grad)

    _merge.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch warns of other hooks on pickling

    def usable(self, weight: object) -> bool:
        """May this forward pass's backward record?"""
        return self.active and self.fits(weight)

    def fits(self, weight: object) -> bool:
        return weight is self.weight and self.weight.requires_grad and self._owner.here()

    def wanted(self) -> bool:
        """Shall this backward pass record? Not where a user's own hook on the weight must see a real gradient."""
        return (
            not self._closed
            and self._travels()
            and len(self.weight._backward_hooks or ()) == 1
            and len(self.weight._post_accumulate_grad_hooks or ()) <= 1
        )

    def _travels(self) -> bool:
        return self.active and not self.paused

    @torch.no_grad()
    def close(self) -> None:
        """Nothing is recorded from now on; what is recorded already goes to ``p.grad``."""
        self._closed = True
        while self._detach:
            self._detach.pop()()
        self.handle.remove()
        if self.factors:
            self.weight.grad = self.spend(self.weight.grad)

    def node(self) -> Any:
        """The weight's AccumulateGrad node; another one after a change of dtype or device."""
        key = (self.weight.dtype, self.weight.device)
        if self._node is None or self._node[0] != key:
            self._node = (key, get_gradient_edge(self.weight).node)
        return self._node[1]


class Factors(Record):
    """Of linear layers: (u [k, M], v [k, N]) per use."""

    factors: list[tuple[Tensor, Tensor]]

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """All that is recorded, which is recorded no longer, for the present stream."""
        factors, self.factors = self.factors, []
        self.streams.join(t for pair in factors for t in pair)
        self.streams.clear()
        return factors

    def spend(self, grad: Tensor | None) -> Tensor | None:
        for u, v in self.take():
            part = product(u, v, self.weight.dtype if grad is None else grad.dtype)
            grad = part if grad is None else grad + part  # not in place: it may be another's too
        return grad


def product(u: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense gradient u^T v: [M, N]."""
    return (u.t() @ v).to(dtype)


class _FactorLinear(torch.autograd.Function):
    """b + x W^T, of x [k, N] and W^T [N, M]; backward records the factors of W's gradient and returns none for W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wt: Tensor, b: Tensor | None, record: Record) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        kept = (wt if needs_x else None, x if needs_w else None)
        ctx.save_for_backward(*(kept if b is None else reversed(kept)))
        ctx.record, ctx.shape_b = record, None if b is None else b.shape
        return torch.mm(x, wt) if b is None else torch.addmm(b, x, wt)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = grads
        wt, x = ctx.saved_tensors if ctx.shape_b is None else reversed(ctx.saved_tensors)
        gx = gw = gb = None
        with torch.autocast(autocast_device(u), enabled=False):
            if ctx.needs_input_grad[0]:
                gx = u @ wt.t()
            if ctx.needs_input_grad[2]:
                gb = u.sum_to_size(ctx.shape_b)
            if ctx.needs_input_grad[1]:
                mode = backward_mode(ctx.record)
                if mode == "factors":
                    ctx.record.factors.append((u.detach(), x.detach()))
                    ctx.record.streams.note(u)
                elif mode == "dense":
                    ctx.record.given = True
                    gw = (u.t() @ x).t()
        return gx, gw, gb, None


def linear(x: Tensor, w: Tensor, b: Tensor | None, record: Record) -> Tensor:
    """``F.linear(x, w, b)``, whose backward records: by the same operations, of which only the product is ours."""
    device = autocast_device(x)
    autocast = torch.is_autocast_enabled(device)
    if autocast:
        dtype = torch.get_autocast_dtype(device)
        x, w = _cast(x, dtype), _cast(w, dtype)
        b = None if b is None else _cast(b, dtype)
    shape = x.shape
    fused = b is not None and (len(shape) == 2 or x.is_contiguous())
    if len(shape) != 2:
        x = x.flatten(0, -2) if len(shape) > 2 else x.unsqueeze(0)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        y: Tensor = _FactorLinear.apply(x, w.t(), b if fused else None, record)
        if len(shape) != 2:
            y = torch.ops.aten._unsafe_view(y, (*shape[:-1], y.shape[-1]))
        return y if fused or b is None else y + b


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: not what is more precise on purpose."""
    return t if t.dtype == torch.float64 else t.to(dtype)


def backward_mode(record: Record) -> str:
    """What this backward pass wants of the weight: its factors, a real gradient, or nothing."""
    if torch.is_grad_enabled():  # create_graph: somebody will differentiate the gradient
        return "dense"
    try:
        if not torch._C._will_engine_execute_node(record.node()):
            return "nothing"
    except RuntimeError:  # captured by autograd.grad
        return "dense"
    return "factors" if record.wanted() else "dense"


def _forward_linear(self: nn.Linear, input: Tensor) -> Tensor:
    record = recorder(self, input)
    if record is None or not input.dim():
        return type(self).forward(self, input)
    return linear(input, record.weight, self.bias, record)


def recorder(module: nn.Module, *inputs: object) -> Any:
    """Where this forward of a layer records; None where it has to compute natively."""
    if torch.compiler.is_compiling():  # before anything that compilers would look into
        return None
    record = _RECORDS.get(module)
    if (
        record is None
        or not record.usable(module._parameters.get("weight"))
        or not torch.is_grad_enabled()
        or any(type(x) not in (Tensor, nn.Parameter) for x in inputs)
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or fwad._current_level >= 0
    ):
        return None
    return record


def can_capture(module: nn.Module) -> bool:
    """Exactly ``nn.Linear`` (a subclass may do anything) with a plain 2-D weight of its own, in row-major order."""
    weight = module._parameters.get("weight")
    return (
        type(module) is nn.Linear
        and type(weight) is nn.Parameter
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.is_floating_point()
    )


def attach(
    module: nn.Module, record: Record, forward: Callable[..., Tensor] = _forward_linear, **others: Callable[..., Any]
) -> None:
    """Let `module` record into `record` until that is closed, by a ``forward`` of its own. Its class stays: users look
    for it. That of somebody else's in the module's ``__dict__`` stays too; it may ask :func:`recorder` itself.

    Args:
        others: methods by name that stand in too.
    """
    _RECORDS[module] = record
    ours: dict[str, Callable[..., Any]] = {"forward": forward, "__getstate__": plain_state, **others}
    mine = {name: MethodType(call, module) for name, call in ours.items() if name not in module.__dict__}
    module.__dict__.update(mine)
    _STAND_INS.update(ours.values())

    def detach() -> None:
        _RECORDS.pop(module, None)
        for name, method in mine.items():
            if module.__dict__.get(name) is method:
                del module.__dict__[name]

    record._detach.append(detach)


def plain_state(self: nn.Module) -> dict[str, Any]:
    """What copies and pickles of a layer are made of: nothing of what stands in it here."""
    state: dict[str, Any] = type(self).__getstate__(self)
    return {k: v for k, v in state.items() if getattr(v, "__func__", None) not in _STAND_INS}


@lru_cache(maxsize=1)
def self_test() -> bool:
    """Does this torch's autograd still behave as factor capture needs?

    Needed: an undefined gradient still runs the weight's hooks, once, after all uses; the engine tells
    which nodes it will run; a queued callback comes last.
    """
    seen: list[Any] = []
    weight = torch.zeros(1, requires_grad=True)
    unused = torch.zeros(1, requires_grad=True)
    x = torch.zeros(1, requires_grad=True)

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            seen.append(("will", torch._C._will_engine_execute_node(get_gradient_edge(weight).node)))
            return grads[0], None

    def last(_: Tensor) -> None:
        seen.append(("unused", torch._C._will_engine_execute_node(get_gradient_edge(unused).node)))
        Variable._execution_engine.queue_callback(lambda: seen.append(("end", True)))

    try:
        weight.register_hook(lambda g: seen.append(("leaf", g is None)))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad is None)))
        x.register_hook(last)
        with torch.enable_grad():
            Probe.apply(Probe.apply(x, weight), weight).sum().backward()
    except (AttributeError, RuntimeError, TypeError):
        return False
    order = [kind for kind, _ in seen if kind in ("will", "leaf", "post")]
    return (
        sorted(seen)
        == [("end", True), ("leaf", True), ("post", True), ("unused", False), ("will", True), ("will", True)]
        and seen[-1][0] == "end"
        and order == ["will", "will", "leaf", "post"]
    )
