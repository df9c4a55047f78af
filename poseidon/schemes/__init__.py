"""How one layer's gradient is made global: ps, sfb."""

from poseidon.planning import Unit
from poseidon.schemes.base import Context, Contribution, Scheme
from poseidon.schemes.memory import raw, storage_order
from poseidon.schemes.ps import PS
from poseidon.schemes.sfb import SFB, reconstruct

__all__ = [
    "PS",
    "SFB",
    "Context",
    "Contribution",
    "Scheme",
    "make_scheme",
    "raw",
    "reconstruct",
    "storage_order",
]


def make_scheme(unit: Unit, context: Context) -> Scheme:
    return SFB(unit, context) if unit.scheme == "sfb" else PS(unit, context)
