"""``model.density``: how sparse a model's sufficient factors are, where nothing computes that would tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from poseidon.errors import UserError


class FactorDensity(NamedTuple):
    """Share of non-zeros in a linear layer's factors: u, the gradient of its output, and v, its input."""

    u: float = 1.0
    v: float = 1.0


def densities(model: Mapping[str, Any]) -> dict[str, FactorDensity]:
    """By path of the layer; what is missing is dense.

    Raises:
        UserError: naming the key, if it holds anything else.
    """
    given = model.get("density") or {}
    if not isinstance(given, Mapping):
        raise UserError(f"model.density={given}: must give shares by layer, such as {{fc6: {{u: 0.25, v: 0.36}}}}")
    return {str(layer): _one(f"model.density.{layer}", its) for layer, its in given.items()}


def _one(key: str, given: Any) -> FactorDensity:
    if not isinstance(given, Mapping) or not set(given) <= {"u", "v"}:
        raise UserError(f"{key}={given}: must be the shares of non-zeros, such as {{u: 0.25, v: 0.36}}")
    for name, share in given.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise UserError(f"{key}.{name}={share}: must lie between 0 and 1")
    return FactorDensity(**{name: float(share) for name, share in given.items()})
