"""torchvision's architectures with the smallest input each takes, and what their training loss is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import get_model, get_model_weights, list_models
from torchvision.models.video import mvit

CLASSES = 10
ROWS = 2
#: Of parameters, with 10 classes; what is larger is skipped.
LIMIT = 100_000_000

LARGER = dict.fromkeys(
    [
        "convnext_large",
        "efficientnet_v2_l",
        "regnet_x_32gf",
        "regnet_y_128gf",
        "regnet_y_32gf",
        *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
        "vit_h_14",
        "vit_l_16",
        "vit_l_32",
        "wide_resnet101_2",
    ],
    "more than 100 M parameters",
)
#: Left out of every run: {architecture: reason}.
SKIPPED = LARGER

#: Side of the smallest square image, where 32 is too small.
SIDES = {
    "alexnet": 64,
    "googlenet": 64,
    "inception_v3": 299,  # its auxiliary head needs the whole image
    "maxvit_t": 224,
    "quantized_googlenet": 64,
    "quantized_inception_v3": 75,
    "s3d": 224,
    "squeezenet1_0": 48,
    "squeezenet1_1": 48,
}

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Recipe:
    """How one architecture is made and trained.

    Attributes:
        make: the model, in training mode.
        batch: (generator) -> the model's arguments, and what `loss` needs.
        loss: (model, batch) -> scalar.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


def names() -> list[str]:
    """Everything torchvision lists, but what is skipped."""
    return [name for name in list_models() if name not in SKIPPED]


def size(name: str) -> int:
    """Published number of parameters (with ImageNet's 1,000 classes)."""
    return int(next(iter(get_model_weights(name))).meta["num_params"])


def side(name: str) -> int:
    return SIDES.get(name, 32)


def recipe(name: str) -> Recipe:
    kind = get_model.__globals__["BUILTIN_MODELS"][name].__module__.split(".")[2]
    return {"segmentation": segmentation, "detection": detection, "video": video, "optical_flow": flow}.get(
        kind, classification
    )(name)


# --- classification ----------------------------------------------------------------------------------------------


def classification(name: str) -> Recipe:
    pixels = side(name)
    options: dict[str, Any] = {"image_size": pixels} if name.startswith("vit") else {}
    if "googlenet" in name or "inception" in name:
        options = {"init_weights": False, "aux_logits": name != "quantized_inception_v3"}
    return Recipe(
        lambda: get_model(name, weights=None, num_classes=CLASSES, **options),
        lambda generator: (torch.randn(ROWS, 3, pixels, pixels, generator=generator), labels(generator)),
        of_logits,
    )


def labels(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (ROWS, *shape), generator=generator)


def of_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of all heads, a mean over rows."""
    out = model(batch[0])
    heads = out if isinstance(out, tuple) else (out,)
    return torch.stack([F.cross_entropy(head, batch[1]) for head in heads if head is not None]).sum()


# --- segmentation, video and optical flow -----------------------------------------------------------------------


def segmentation(name: str) -> Recipe:
    options = {} if name.startswith("lraspp") else {"aux_loss": True}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.stack([F.cross_entropy(maps, batch[1]) for maps in model(batch[0]).values()]).sum()

    return Recipe(
        lambda: get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES, **options),
        lambda generator: (torch.randn(ROWS, 3, 32, 32, generator=generator), labels(generator, 32, 32)),
        loss,
    )


def video(name: str) -> Recipe:
    frames, pixels = (16, side(name)) if name == "s3d" else (8, 64) if "mvit" in name else (4, 32)

    def smaller(**options: Any) -> nn.Module:
        return mvit_class(**{**options, "spatial_size": (pixels, pixels), "temporal_size": frames})

    mvit_class = mvit.MViT

    def make() -> nn.Module:
        # The builder of MViT fixes 16 frames of 224 x 224, whose one step takes minutes.
        patch: AbstractContextManager[Any] = (
            mock.patch.object(mvit, "MViT", smaller) if "mvit" in name else nullcontext()
        )
        with patch:
            return get_model(name, weights=None, num_classes=CLASSES)

    return Recipe(
        make,
        lambda generator: (torch.randn(ROWS, 3, frames, pixels, pixels, generator=generator), labels(generator)),
        of_logits,
    )


def flow(name: str) -> Recipe:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.stack([(out - batch[2]).abs().mean() for out in model(*batch[:2], num_flow_updates=2)]).sum()

    def batch(generator: torch.Generator) -> Batch:
        first, second = torch.randn(2, ROWS, 3, 128, 128, generator=generator)
        return first, second, torch.randn(ROWS, 2, 128, 128, generator=generator)

    return Recipe(lambda: get_model(name, weights=None), batch, loss)


# --- detection ---------------------------------------------------------------------------------------------------


def detection(name: str) -> Recipe:
    options: dict[str, Any] = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 64}
    if "rcnn" in name:  # a few proposals instead of thousands, which take a minute
        options |= {"rpn_pre_nms_top_n_train": 40, "rpn_post_nms_top_n_train": 20, "box_batch_size_per_image": 16}
    if "keypoint" in name:
        options["num_keypoints"] = 3
    return Recipe(
        lambda: get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES, **options),
        lambda generator: detections(name, generator),
        lambda model, batch: torch.stack(list(model(*batch).values())).sum(),
    )


def detections(name: str, generator: torch.Generator) -> Batch:
    """Images of different size, each with two boxes, and masks or keypoints in them."""
    images = [torch.rand(3, 64 + 8 * row, 64, generator=generator) for row in range(ROWS)]
    targets = []
    for _ in range(ROWS):
        corner = torch.rand(2, 2, generator=generator) * 20
        boxes = torch.cat([corner, corner + 20 + torch.rand(2, 2, generator=generator) * 20], 1)
        target = {"boxes": boxes, "labels": torch.randint(1, CLASSES, (2,), generator=generator)}
        if "mask" in name:
            target["masks"] = torch.ones(2, 64, 64, dtype=torch.uint8)
        if "keypoint" in name:
            inside = (boxes[:, None, :2] + 10).expand(2, 3, 2)
            target["keypoints"] = torch.cat([inside, torch.ones(2, 3, 1)], 2)
        targets.append(target)
    return images, targets
