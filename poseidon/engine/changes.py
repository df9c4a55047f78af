"""Noticing that a model's parameters are others than those that all ranks agreed on."""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from poseidon.engine.backward import borrowed
from poseidon.engine.parameters import check_distributable, held


class Change(Enum):
    """What a look at the parameters found."""

    NONE = 0  # but for some that are frozen for a while: unused until they are trained again
    UNFROZEN = 1  # one is trained that was not
    REPLACED = 2  # other ones, or other in type, shape, order in memory or device; or a new layer with buffers
    ALIEN = 3  # a call with borrowed parameters, none of them the model's; or a tracer's


class Agreed:
    """A model's parameters as all ranks agreed on them.

    Args:
        trained: ids of those that are trained.
        where: the device that they must be on.
    """

    def __init__(self, model: nn.Module, trained: Container[int], where: torch.device) -> None:
        self._model, self._trained, self._where = model, trained, where
        self._modules = {id(module): module for module in model.modules()}
        self._kept = list(model.parameters())  # that no other gets the id of one that is gone
        self._seen = self._fingerprint()
        self._there = {each[1:] for each in self._seen}

    def look(self) -> Change:
        """Runs before every forward and backward pass: a microsecond per parameter.

        Raises:
            UserError: what the parameters are now cannot be distributed.
        """
        if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
            return Change.ALIEN
        try:
            seen = self._fingerprint()
        except RuntimeError:  # no shape yet
            check_distributable(self._model, self._where)
            raise
        if seen == self._seen:
            return Change.NONE
        if borrowed():
            return Change.NONE if any(each[1] in self._trained for each in seen) else Change.ALIEN
        if {each[1:] for each in seen} != self._there:
            check_distributable(self._model, self._where)
            return Change.REPLACED
        if any(each[0] and each[1] not in self._trained for each in seen):
            return Change.UNFROZEN
        self._seen = seen
        return Change.NONE

    def ids(self) -> set[int]:
        """Of the parameters that are there now."""
        return {id(p) for module in self._model.modules() for p in held(module)}

    def new_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of layers that came since, with their names. What a layer does to its own is its affair: ranks' caches
        may differ."""
        for path, module in self._model.named_modules():
            if id(module) not in self._modules:
                yield from module.named_buffers(path, recurse=False)

    def _fingerprint(self) -> list[tuple[Any, ...]]:
        """(trained?, id, what it is like) of each parameter, and what layers with buffers came since. Taken in half the
        time of ``model.parameters()`` alone."""
        found: list[tuple[Any, ...]] = []
        modules = [self._model]
        for module in modules:
            found += [(p.requires_grad, id(p), p.dtype, p.shape, p.stride(), p.device) for p in held(module)]
            if module._buffers and id(module) not in self._modules:
                found.append((False, id(module)))
            modules += [child for child in module._modules.values() if child is not None]
        return found
