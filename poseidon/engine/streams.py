"""CUDA's streams on which tensors were made that another one is going to read."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Streams:
    """Those that have made something; on the CPU none.

    Autograd runs a layer's backward pass on the stream of its forward pass, and lets streams wait for each other where
    gradients pass between them. What passes otherwise is for us to order: recorded factors, from the layer's stream to
    that of its weight, and gradients that leave together.
    """

    def __init__(self) -> None:
        self._made: set[torch.cuda.Stream] = set()

    def note(self, tensor: torch.Tensor) -> None:
        """The present stream has made something on this tensor's device."""
        if tensor.is_cuda:
            self._made.add(torch.cuda.current_stream(tensor.device))

    def join(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """What the present stream is given from now on comes after that, and uses `tensors`, which may then go."""
        for stream in self._made:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)
                for tensor in tensors:
                    tensor.record_stream(current)

    def clear(self) -> None:
        self._made.clear()
