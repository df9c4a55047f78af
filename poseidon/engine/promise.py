"""Stands in ``p.grad`` for a global gradient that is still on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map


class Promise(torch.Tensor):
    """Looks like the gradient; whatever is done with it is done with the gradient itself, after waiting for that.

    PyTorch hands every function that is called with a tensor of a subclass to ``__torch_function__``, methods and
    attributes included. So nobody can clip, unscale, log or step with what is not there yet.

    Alternatives: None would be left out in silence by whoever clips; this rank's own gradient would be clipped instead
    of the average, and is being written over.
    """

    _keep: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_kept, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def promise(blank: torch.Tensor, keep: Callable[[], torch.Tensor]) -> Promise:
    """Args:
    blank: of the gradient's shape, type and device; nobody looks at what is in it.
    keep: waits for the gradient.
    """
    made = torch.Tensor._make_subclass(Promise, blank)
    made._keep = keep
    return made


def _kept(value: Any) -> Any:
    return value._keep() if type(value) is Promise else value
