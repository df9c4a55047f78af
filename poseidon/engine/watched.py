"""A model's parameters, which say so when they are looked at."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn

Read = Callable[[Iterable[int]], None]
_ZERO = nn.Module.zero_grad.__code__


class Watched(dict[str, Any]):
    """In the place of ``module._parameters``: there ``module.weight``, ``parameters()``, ``state_dict()``, ``to()`` and
    copies all look. A copy is a plain dictionary.

    Args:
        read: called with the ids of what is being looked at, before.
    """

    def __init__(self, params: dict[str, Any], read: Read) -> None:
        super().__init__(params)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        self._read((id(found),))
        return found

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        self._read((id(found),))
        return found

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self[key]
        return super().pop(key, *default)

    def __iter__(self) -> Any:
        """Its own, so that dict(...) and {**...} go through __getitem__."""
        return super().__iter__()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def _read_all(self) -> None:
        # nn.Module.zero_grad() looks at gradients only, through parameters(), two more generators and a lambda.
        frame: Any = sys._getframe(2)
        for _ in range(5):
            if frame is None:
                break
            if frame.f_code is _ZERO:
                return
            frame = frame.f_back
        self._read(tuple(map(id, super().values())))


class Access:
    """Who looks at a model's parameters: calls of its modules, and everybody who gets them from their modules.

    What a forward pass uses without either (references kept in a list) is found out by one whose gradients are known.

    Attributes:
        inside: a forward pass of the root module.
        hidden: ids of what it uses unseen.
        known: that has been found out.
    """

    def __init__(self, read: Read) -> None:
        self.inside = self.known = False
        self.hidden: tuple[int, ...] = ()
        self._read = read
        self._used: set[int] = set()
        self._of: dict[nn.Module, tuple[int, ...]] = {}
        self._modules: list[nn.Module] = []
        self._frames = 0  # compiled when the model was hooked
        self._undo: list[Callable[[], None]] = []

    def hook(self, model: nn.Module, trained: Container[int]) -> None:
        """A model, and the ids of its parameters that are trained. Watched from the first :meth:`learn` on: compilers,
        which show up before that, must not find watched parameters."""
        self.hidden, self.known, self._used, self._frames = (), False, set(), _compiled_frames()
        self._modules = list(model.modules())
        for module in self._modules:
            ids = tuple(id(p) for p in module.parameters(recurse=False) if id(p) in trained)
            if ids:
                self._of[module] = ids

    def unhook(self) -> None:
        self._of.clear()
        self._modules.clear()
        while self._undo:
            self._undo.pop()()

    def compiled(self) -> bool:
        """Is a part of the model, or has anything been, since it was hooked? What compiled code reads is not seen."""
        marks = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in self._modules)
        return marks or _compiled_frames() != self._frames

    def of(self, module: nn.Module) -> tuple[int, ...]:
        return self._of.get(module, ())

    def note(self, ids: Iterable[int]) -> None:
        """These are looked at."""
        if self.inside and not self.known:
            self._used.update(ids)

    def learn(self, made: Iterable[int]) -> None:
        """A backward pass has made gradients of these, by id."""
        if not self._undo:
            if not self.compiled():
                self._undo = [undo for module in self._of if (undo := _watch(module, self._read)) is not None]
            self._used.clear()
        elif self._used and not self.known:
            self.hidden, self.known = tuple(each for each in made if each not in self._used), True


def _watch(module: nn.Module, read: Read) -> Callable[[], None] | None:
    """Returns what undoes it; None where the module has no parameters, or keeps them elsewhere (TorchScript)."""
    params = module.__dict__.get("_parameters")
    if not params or type(params) is not dict or isinstance(module, torch.jit.ScriptModule):
        return None
    watched = module.__dict__["_parameters"] = Watched(params, read)

    def undo() -> None:
        if module.__dict__["_parameters"] is watched:
            module.__dict__["_parameters"] = dict(dict.items(watched))

    return undo


def _compiled_frames() -> int:
    """Frames of Python that torch.compile has looked at so far in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])
