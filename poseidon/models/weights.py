"""Weights to start from, out of a file: a checkpoint of ``poseidon train``, or a saved ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from poseidon.errors import UserError
from poseidon.models.check import find_weights

#: Where checkpoints keep the state_dict: ours and torchvision's recipes, Lightning's.
_ENTRIES = ("model", "state_dict")
#: What wrappers of a model put before its names: DistributedDataParallel, torch.compile.
_PREFIXES = ("module.", "_orig_mod.")
#: More misfits than this are not a head of another size: it is another network.
_MOST_LAYERS = 6


def load_weights(model: nn.Module, weights: str | Path, fresh: Sequence[str] = (), option: str = "model.fresh") -> None:
    """Copies the tensors of a file into the model, in place. Runs no code out of the file.

    Args:
        weights: a checkpoint of ``poseidon train``, or what ``torch.save(model.state_dict(), PATH)`` wrote, also of
            a model wrapped in DistributedDataParallel.
        fresh: names of layers that keep the weights they have, whatever the file says of them: a head of another
            size.
        option: what errors call ``fresh``.

    Raises:
        UserError: no such file, none with weights, or not of this model: says the first tensor that does not fit,
            and both shapes. The model is unchanged then.
    """
    own, saved = model.state_dict(), _unwrapped(_read(weights), model)
    everything = {*own, *saved}
    unknown = [name for name in fresh if not any(_within(key, name) for key in everything)]
    if unknown:
        layers = ", ".join(dict.fromkeys(key.partition(".")[0] for key in own))
        raise UserError(f"{option}: this model has no layer {unknown[0]}; it has {layers}")
    kept = {key for key in everything if not any(_within(key, name) for name in fresh)}
    misfits = [key for key in dict.fromkeys((*own, *saved)) if key in kept and not _fits(key, saved, own)]
    if misfits:
        raise UserError(f"model.weights={weights}: {_describe(misfits, saved, own, fresh, option)}")
    model.load_state_dict({**own, **{key: value for key, value in saved.items() if key in kept}})


def _read(weights: str | Path) -> Mapping[str, Any]:
    path = find_weights(weights)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"model.weights={weights}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a file that is something else makes of the reader
        if "Unsupported global" in str(error):
            raise UserError(
                f"model.weights={weights}: holds more than weights, such as a whole model, which would run code; "
                f"save its weights alone: torch.save(model.state_dict(), PATH)"
            ) from error
        raise UserError(f"model.weights={weights}: {_NOT_WEIGHTS}") from error
    for entry in _ENTRIES:
        if isinstance(content, Mapping) and isinstance(content.get(entry), Mapping):
            content = content[entry]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"model.weights={weights}: {_NOT_WEIGHTS}")
    return {str(key): value for key, value in content.items()}


_NOT_WEIGHTS = (
    "is neither a checkpoint of `poseidon train` nor weights as torch.save(model.state_dict(), PATH) writes them"
)


def _unwrapped(saved: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Without a wrapper's prefix, unless the model has a child of that name itself."""
    children = dict(model.named_children())
    for prefix in _PREFIXES:
        if prefix[:-1] not in children and all(key.startswith(prefix) for key in saved):
            saved = {key.removeprefix(prefix): value for key, value in saved.items()}
    return saved


def _within(key: str, layer: str) -> bool:
    return key == layer or key.startswith(f"{layer}.")


def _fits(key: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    if key not in saved:
        return key.endswith(".num_batches_tracked")  # old files lack it, and nothing but a count is lost
    return key in own and (is_lazy(own[key]) or _shape(saved[key]) == _shape(own[key]))


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _describe(
    misfits: Sequence[str], saved: Mapping[str, Any], own: Mapping[str, Any], fresh: Sequence[str], option: str
) -> str:
    """The first misfit with both shapes, and what to do about all of them."""
    key = misfits[0]
    there, here = (str(_shape(state[key])) if key in state else "missing" for state in (saved, own))
    reason = f"{key} is {there} in the file, {here} in this run's model"
    layers = _layers(misfits, set(saved) & set(own))
    if len(layers) > _MOST_LAYERS or len(misfits) >= len(own):
        return f"{reason}, and {len(misfits)} of the tensors do not fit: the file is of another network"
    return f"{reason}; to start such layers anew and load all others, add {option}=[{','.join([*fresh, *layers])}]"


def _layers(misfits: Sequence[str], common: Set[str]) -> list[str]:
    """The outermost layers in which nothing fits; where something does, the innermost layer of the misfit."""
    fitting = common - set(misfits)
    found: list[str] = []
    for key in misfits:
        parts = key.split(".")
        names = [".".join(parts[:depth]) for depth in range(1, max(len(parts), 2))]
        whole = (name for name in names if not any(_within(other, name) for other in fitting))
        found.append(next(whole, names[-1]))
    return list(dict.fromkeys(found))
