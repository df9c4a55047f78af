"""torchvision's classification networks, sized for the data set."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torchvision
from torch import nn

from poseidon.errors import UserError
from poseidon.models.sizes import LEAST, ShapeError, check_images, check_positive

#: These have auxiliary heads, and torchvision warns unless it is told to draw their first weights as it always has.
_AUXILIARY = ("googlenet", "inception_v3")


def torchvision_model(
    arch: str, num_classes: int, shape: Sequence[int] | None = None, aux: bool = False, **options: Any
) -> nn.Module:
    """A network of ``torchvision.models`` with fresh weights.

    Args:
        arch: its name there, such as ``resnet18``.
        shape: channels, height and width of an image: tried out, without memory or time for it.
        aux: with the auxiliary heads of ``googlenet`` and ``inception_v3``; then the output in training is a named
            tuple (scores, auxiliary scores ...), each of (rows, num_classes). No other network has any.
        options: handed to torchvision.

    Raises:
        UserError: no such network, not a classifier, or not for images of this shape.
    """
    check_options(arch, num_classes, shape, aux, options)
    return _make(arch, num_classes, aux, options)


def check_options(
    arch: str, num_classes: int, shape: Sequence[int] | None, aux: bool, options: Mapping[str, Any]
) -> None:
    """Raises UserError if :func:`torchvision_model` would. Draws no random numbers."""
    check_arch(arch)
    check_positive(num_classes=num_classes)
    if aux and arch not in _AUXILIARY:
        raise UserError(f"model.aux=true: {arch} has no auxiliary heads; {' and '.join(_AUXILIARY)} have")
    if shape is not None:
        _check_shape(arch, num_classes, shape, aux, options)


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


def _check_shape(arch: str, num_classes: int, shape: Sequence[int], aux: bool, options: Mapping[str, Any]) -> None:
    if arch in LEAST:
        check_images(arch, shape, aux)
        return
    with torch.device("meta"), torch.no_grad():  # shapes only: no memory, no arithmetic, no random numbers
        try:
            model = _make(arch, num_classes, aux, options).train()
        except NotImplementedError:  # it computes with numbers while it is made: not to be tried without them
            return
        try:
            model(torch.empty(2, *shape))
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ShapeError(
                f"model.name={arch} cannot take images of dataset.shape={list(shape)}: {reason}"
            ) from error


def _make(arch: str, num_classes: int, aux: bool, options: Mapping[str, Any]) -> nn.Module:
    special = {"aux_logits": aux, "init_weights": True} if arch in _AUXILIARY else {}
    model: nn.Module = torchvision.models.get_model(
        arch, weights=None, num_classes=num_classes, **{**special, **options}
    )
    return model
