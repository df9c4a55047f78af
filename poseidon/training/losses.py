"""Losses: modules called with (output, target) that give the mean over the rows of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from poseidon.errors import UserError


class CrossEntropy(nn.Module):
    """Cross-entropy of scores, also of networks with auxiliary heads and of language models.

    On a plain (rows, classes, ...) tensor it is ``torch.nn.CrossEntropyLoss``. A tuple is a network's
    (scores, auxiliary scores ...): the loss of the first, plus ``auxiliary_weight`` times that of each other one that
    is not None.

    Args:
        classes_dim: dimension of the scores that runs over the classes; -1 for language models' (rows, positions,
            vocabulary), whose loss is the mean over all positions.
        auxiliary_weight: 0.3 as for GoogLeNet (Szegedy et al. 2015, section 5).
        label_smoothing: share of the target that is spread over all classes, from 0 to 1.
        ignore_index: target that does not count. If ranks have different shares of these, the global gradient is not
            the mean over all that count, since ranks are weighted by rows.

    Raises:
        UserError: when called, if scores and target do not go together.
    """

    def __init__(
        self,
        classes_dim: int = 1,
        auxiliary_weight: float = 0.3,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
        self.classes_dim = classes_dim
        self.auxiliary_weight = auxiliary_weight
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index

    def forward(self, output: Any, target: Tensor) -> Tensor:
        """One number.

        Args:
            output: scores, or a tuple of them.
            target: class indices, shaped like the scores without the dimension of the classes; or probabilities, shaped
                like the scores.
        """
        main, *auxiliary = output if isinstance(output, (tuple, list)) else (output,)
        loss = self._of(main, target)
        for scores in auxiliary:
            if scores is not None:
                loss = loss + self.auxiliary_weight * self._of(scores, target)
        return loss

    def _of(self, scores: Any, target: Tensor) -> Tensor:
        if not isinstance(scores, Tensor):
            raise UserError(
                f"loss: the model gave {type(scores).__name__}; CrossEntropy takes a tensor of scores, or a tuple of "
                f"(scores, auxiliary scores ...)"
            )
        shapes = f"scores are {tuple(scores.shape)}, targets {tuple(target.shape)} of {target.dtype}"
        try:
            if scores.dim() > 1 and self.classes_dim % scores.dim() != 1:
                scores, target = self._in_rows(scores, target)
            return functional.cross_entropy(
                scores, target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise UserError(
                f"loss: {' '.join(str(error).split())} ({shapes}; loss.classes_dim={self.classes_dim})"
            ) from error

    def _in_rows(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, classes) and (rows,): every position is a row; a view if the classes come last."""
        flat = scores.movedim(self.classes_dim, -1).flatten(0, -2)
        if target.shape == scores.shape:  # probabilities
            return flat, target.movedim(self.classes_dim, -1).flatten(0, -2)
        expected = scores.select(self.classes_dim, 0).shape
        if target.shape != expected:
            raise ValueError(f"targets must be {tuple(expected)}")
        return flat, target.flatten()
