"""What ``fully_shard`` leaves on modules, so that they can be plain again: it has no way back itself."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import _composable_state


class Traces:
    """Hooks, attributes and classes that a model got since this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, module.__class__, set(vars(module)), {name: set(hooks) for name, hooks in _hooks(module).items()})
            for module in model.modules()
        ]
        self._added: list[tuple[dict[Any, Any], Any]] = []

    def note(self) -> None:
        """Everything that is new until now is FSDP's, except its hooks before a ``state_dict``: they would cut the
        parameters up, and only one rank may be saving them."""
        for module, _, attributes, hooks in self._before:
            self._added += [(vars(module), name) for name in set(vars(module)) - attributes]
            for name, found in _hooks(module).items():
                new = [(found, key) for key in found if key not in hooks.get(name, ())]
                if name == "_state_dict_pre_hooks":
                    _erase(new)
                else:
                    self._added += new

    def erase(self) -> None:
        _erase(self._added)
        for module, cls, _, _ in self._before:
            module.__class__ = cls
            _composable_state._module_state_mapping.pop(module, None)


def _erase(entries: list[tuple[dict[Any, Any], Any]]) -> None:
    for where, key in entries:
        where.pop(key, None)


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: value for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)}
