"""Catching sufficient factors: a Linear layer records (u, v) instead of multiplying them.

The layer's weight then receives no gradient from this use, and its AccumulateGrad node still runs once all
uses are done: that is where the engine looks at what came (factors, a dense gradient from other uses, both,
neither). So an irregular model needs no detection to be right: it is merged, and goes dense.

Everything semi-private that this leans on is tried once by :func:`self_test`; without it the engine goes dense.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd import forward_ad as fwad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from poseidon.transport import Owner

Tensor = torch.Tensor

ATTRIBUTE = "_poseidon_record"


class Record:
    """What the uses of one weight recorded in the current backward passes, instead of a gradient.

    Attributes:
        factors: one entry per use, in the order of the backward pass.
        active: False: the layer computes natively.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.factors: list[Any] = []
        self.active = True
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
        """May this forward record?"""
        return self.active and self._owner.here() and self.may_record(weight)

    def may_record(self, weight: object) -> bool:
        """A user's own hook on the weight must see a real gradient: then it may not."""
        return (
            weight is self.weight
            and self.weight.requires_grad
            and len(self.weight._backward_hooks or ()) == 1
            and len(self.weight._post_accumulate_grad_hooks or ()) <= 1
        )

    def node(self) -> Any:
        """The weight's AccumulateGrad node; another one after a change of dtype or device."""
        key = (self.weight.dtype, self.weight.device)
        if self._node is None or self._node[0] != key:
            self._node = (key, get_gradient_edge(self.weight).node)
        return self._node[1]


class Factors(Record):
    """Of linear layers: (u [k, M], v [k, N]) per use."""

    factors: list[tuple[Tensor, Tensor]]

    def spend(self, grad: Tensor | None) -> Tensor | None:
        factors, self.factors = self.factors, []
        for u, v in factors:
            part = product(u, v, self.weight.dtype if grad is None else grad.dtype)
            grad = part if grad is None else grad + part  # not in place: it may be another's too
        return grad


def product(u: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense gradient u^T v: [M, N]."""
    return (u.t() @ v).to(dtype)


class _FactorLinear(torch.autograd.Function):
    """y = x W^T + b whose backward records the factors of W's gradient and returns none for W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, record: Record) -> Tensor:
        device = _autocast_device(x)
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        with torch.autocast(device, enabled=False):
            xc, wc, bc = (t if cast is None or t is None else t.to(cast) for t in (x, w, b))
            assert xc is not None
            assert wc is not None
            # In 2-D, since the result of an N-D linear would be a view and forbid a ReLU in place.
            y: Tensor = F.linear(xc.reshape(-1, xc.shape[-1]), wc, bc)
            if xc.dim() != 2:
                y = torch.ops.aten._unsafe_view(y, (*xc.shape[:-1], y.shape[-1]))
        ctx.save_for_backward(xc, w, b)
        ctx.record, ctx.cast, ctx.x_dtype = record, cast, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        x, w, b = ctx.saved_tensors
        gx = gw = gb = None
        with torch.autocast(_autocast_device(g), enabled=False):
            if ctx.needs_input_grad[0]:
                gx = (g @ (w if ctx.cast is None else w.to(ctx.cast))).to(ctx.x_dtype)
            u, v = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
            if b is not None and ctx.needs_input_grad[2]:
                gb = u.sum(0).to(b.dtype)
            if ctx.needs_input_grad[1]:
                mode = backward_mode(ctx.record)
                if mode == "factors":
                    ctx.record.factors.append((u.detach(), v.detach()))
                elif mode == "dense":
                    gw = product(u, v, w.dtype)
        return gx, gw, gb, None


def _autocast_device(x: Tensor) -> str:
    """Where autocast is asked about; it does not know the meta device, on which plans are made."""
    return "cpu" if x.is_meta else x.device.type


def backward_mode(record: Record) -> str:
    """What this backward pass wants of the weight: its factors, a real gradient, or nothing."""
    if torch.is_grad_enabled():  # create_graph: somebody will differentiate the gradient
        return "dense"
    try:
        return "factors" if torch._C._will_engine_execute_node(record.node()) else "nothing"
    except RuntimeError:  # captured by autograd.grad
        return "dense"


class _Linear(nn.Linear):
    """What an engine turns a plain ``nn.Linear`` into; copies and pickles are plain again."""

    def forward(self, x: Tensor) -> Tensor:
        record = recorder(self, x)
        if record is None:
            return F.linear(x, self.weight, self.bias)
        result: Tensor = _FactorLinear.apply(x, self.weight, self.bias, record)
        return result

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(nn.Linear, super().__reduce_ex__(protocol))


def recorder(module: nn.Module, *inputs: object) -> Any:
    """Where this forward of a layer records; None where it has to compute natively."""
    record: Record | None = module.__dict__.get(ATTRIBUTE)
    if (
        record is None
        or not record.usable(module._parameters.get("weight"))
        or not torch.is_grad_enabled()
        or any(type(x) not in (Tensor, nn.Parameter) for x in inputs)
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or fwad._current_level >= 0
    ):
        return None
    return record


def plain(kind: type[nn.Module], parts: Any) -> Any:
    """What a layer's copy or pickle is made of: `parts` of ``__reduce_ex__``, but of a plain layer of that kind."""
    state = {k: v for k, v in parts[2].items() if k != ATTRIBUTE}
    return (_new, (kind,), state, *parts[3:])


def _new(kind: type[nn.Module]) -> nn.Module:
    return object.__new__(kind)


def can_capture(module: nn.Module) -> bool:
    """Exactly ``nn.Linear`` (a subclass may do anything) with a plain 2-D weight of its own, in row-major order."""
    weight = module._parameters.get("weight")
    return type(module) is nn.Linear and type(weight) is nn.Parameter and weight.dim() == 2 and weight.is_contiguous()


def attach(module: nn.Module, record: Record, kind: type[nn.Module] = _Linear) -> Callable[[], None]:
    """Let `module` record into `record` as a `kind`; the returned call undoes it."""
    before = type(module)
    module.__class__ = kind
    module.__dict__[ATTRIBUTE] = record

    def detach() -> None:
        module.__dict__.pop(ATTRIBUTE, None)
        module.__class__ = before
        record.handle.remove()

    return detach


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
