"""How one layer's gradient is made global: ps, sfb, rows, adam, block."""

from poseidon.planning import Unit
from poseidon.schemes.adam import Adam
from poseidon.schemes.average import accumulator_dtype, depth_of
from poseidon.schemes.base import Context, Contribution, Scheme, Share, Touched
from poseidon.schemes.block import Block
from poseidon.schemes.memory import autocast_device, from_bytes, in_order, raw, shaped, storage_order
from poseidon.schemes.ps import PS
from poseidon.schemes.rows import Rows, combine, merge, sum_rows
from poseidon.schemes.sfb import SFB, reconstruct

__all__ = [
    "PS",
    "SFB",
    "Adam",
    "Block",
    "Context",
    "Contribution",
    "Rows",
    "Scheme",
    "Share",
    "Touched",
    "accumulator_dtype",
    "autocast_device",
    "combine",
    "depth_of",
    "from_bytes",
    "in_order",
    "make_scheme",
    "merge",
    "raw",
    "reconstruct",
    "shaped",
    "storage_order",
    "sum_rows",
]


def make_scheme(unit: Unit, context: Context) -> Scheme:
    kinds: dict[str, type[PS | SFB | Rows]] = {"ps": PS, "sfb": SFB, "rows": Rows, "adam": Adam, "block": Block}
    return kinds[unit.scheme](unit, context)
