"""torchvision's classification networks, sized for the data set."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
import torchvision
from torch import nn

from poseidon.errors import UserError
from poseidon.models.sizes import check_positive

#: With auxiliary heads their training output is a tuple, which no loss of one output takes: none for now, unlike
#: in the papers. Without init_weights torchvision warns and then does the same.
_AUXILIARY = {arch: {"aux_logits": False, "init_weights": True} for arch in ("googlenet", "inception_v3")}


def torchvision_model(arch: str, num_classes: int, shape: Sequence[int] | None = None, **options: Any) -> nn.Module:
    """A network of ``torchvision.models`` with fresh weights and without auxiliary heads.

    Args:
        arch: its name there, such as ``resnet18``.
        shape: channels, height and width of an image: tried out, without memory or time for it.
        options: handed to torchvision.

    Raises:
        UserError: no such network, not a classifier, or not for images of this shape.
    """
    check_arch(arch)
    check_positive(num_classes=num_classes)
    options = {**_AUXILIARY.get(arch, {}), **options}
    if shape is not None:
        _try_out(arch, num_classes, shape, options)
    return _make(arch, num_classes, options)


def check_arch(arch: str) -> None:
    """Raises UserError, with the nearest names, unless ``arch`` is a classification network."""
    known = torchvision.models.list_models(module=torchvision.models)
    if arch in known:
        return
    if arch in torchvision.models.list_models():
        raise UserError(
            f"model.name={arch} is no image classifier (detection, segmentation, video and quantized networks need "
            f"a loop of their own: use poseidon.init() and session.distribute() in a script)"
        )
    near = difflib.get_close_matches(str(arch), known, 5, 0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise UserError(
        f"model.name={arch} is none of torchvision's {len(known)} classifiers{hint} (all of them: "
        f"python -c 'import torchvision.models as m; print(m.list_models(module=m))')"
    )


def _try_out(arch: str, num_classes: int, shape: Sequence[int], options: dict[str, Any]) -> None:
    with torch.device("meta"), torch.no_grad():  # shapes only: no memory, no arithmetic, no random numbers
        model = _make(arch, num_classes, {**options, "init_weights": False} if arch in _AUXILIARY else options).eval()
        try:
            model(torch.empty(1, *shape))
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"model.name={arch} cannot take images of dataset.shape={list(shape)}: {reason}") from error


def _make(arch: str, num_classes: int, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = torchvision.models.get_model(arch, weights=None, num_classes=num_classes, **options)
    return model
