"""Where gradients are made: what the engine asks of it, and the plain host.

An emulated accelerator (``poseidon.emulation``) answers the same questions with delays of its own, one with memory of
its own (``staged``) with copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from poseidon import schemes
from poseidon.schemes import Contribution

Then = Callable[[], None]
#: Gets what has been moved.
Moved = Callable[[Any], None]


class Device(Protocol):
    """Between a model's gradients and the host that sends, receives and sums them.

    ``then`` is called once, at once or later and from any thread, in the order of the requests of one kind. What is
    moved is a tensor, a contribution, several of them, a :class:`poseidon.schemes.Share`, or None, where only bytes
    count.

    Attributes:
        has_values: False: tensors have sizes only, and what is in them means nothing.
        where: the device that the model's parameters are on.
    """

    has_values: bool
    where: torch.device

    def ready(self) -> None:
        """What it computes next depends on something that has just happened."""

    def to_host(self, value: Any, nbytes: int, then: Moved) -> None:
        """A gradient of so many bytes is final: once the host has it, `then` gets it as it is there. Called in the
        thread that made it, or in one whose present stream comes after that."""

    def summed(self, nbytes: int, then: Then, post: Callable[[Then], None]) -> None:
        """A server's host has to add so many bytes: once it has. Called in the endpoint's thread, where ``then`` runs
        too: at once, or later through ``post``."""

    def to_device(self, value: Any, nbytes: int, then: Moved) -> None:
        """A result is complete on the host, so many bytes of which have come from elsewhere: once the device has it,
        or it is on its way, `then` gets what `received` takes. Called in the endpoint's thread."""

    def received(self, value: Any) -> Any:
        """Training thread: what `to_device` gave, to be used by what the device computes next."""

    def place(self, value: Any) -> Any:
        """Training thread: what the host has made of results that stayed there, on the device."""

    def reconstruct(
        self,
        name: str,
        contributions: Sequence[Contribution],
        shape: torch.Size,
        dtype: torch.dtype,
        rows: range | None = None,
    ) -> torch.Tensor | None:
        """All ranks' contributions to the weight ``name`` as one dense gradient, [M, N]; or only `rows` of it."""

    def multiplied(
        self, contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The same, as a server's host makes it, which takes ``summed``'s time. Called in the endpoint's thread."""

    def busy(self) -> dict[str, float]:
        """Seconds of emulated work so far, undilated, by part; {} if nothing is emulated."""


class Host:
    """The CPU itself: gradients are where they are sent from."""

    has_values = True
    where = torch.device("cpu")

    def ready(self) -> None:
        pass

    def to_host(self, value: Any, nbytes: int, then: Moved) -> None:
        then(value)

    def summed(self, nbytes: int, then: Then, post: Callable[[Then], None]) -> None:
        then()

    def to_device(self, value: Any, nbytes: int, then: Moved) -> None:
        then(value)

    def received(self, value: Any) -> Any:
        return value

    def place(self, value: Any) -> Any:
        return value

    def reconstruct(
        self,
        name: str,
        contributions: Sequence[Contribution],
        shape: torch.Size,
        dtype: torch.dtype,
        rows: range | None = None,
    ) -> torch.Tensor | None:
        return schemes.reconstruct(contributions, shape, dtype, rows)

    def multiplied(
        self, contributions: Sequence[Contribution], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        return schemes.reconstruct(contributions, shape, dtype)

    def busy(self) -> dict[str, float]:
        return {}
