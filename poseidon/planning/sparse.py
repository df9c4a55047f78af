"""Sparse factors: what coding leaves of them on the wire, and where that is worth its time on a host.

What is coded is exact (``poseidon.schemes.coding``); it takes a core about as long as a link of 8 Gbit/s takes for the
same bytes, for each rank that they come from. So it pays on slow links, and how slow depends on density and nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poseidon.planning.cost import Scheme
from poseidon.planning.topology import Topology

if TYPE_CHECKING:
    from poseidon.planning.book import FactorSize, Param
    from poseidon.planning.time import Rates


def row_bytes(size: FactorSize, m: float, n: float, *, coded: bool) -> float:
    """Of one row of factors, u of M columns and v of N, on the wire. Of a coded one each factor is sent as it is where
    its bits and non-zeros would not be less."""
    if not coded:
        return (m + n) * size.itemsize
    bit = 1 / (8 * size.itemsize)
    return (m * min(1.0, size.u + bit) + n * min(1.0, size.v + bit)) * size.itemsize


@dataclass(frozen=True)
class Load:
    """What one node has to do with factors, per iteration; bytes.

    Attributes:
        wire: that leave it. made: that it codes. used: of others, that it decodes; before coding, both.
    """

    wire: float
    made: float
    used: float


def load(param: Param, scheme: Scheme, size: FactorSize, topology: Topology, *, coded: bool) -> Load:
    """Of a scheme that sends factors, at the node that has most to do; of what else it sends, nothing."""
    workers, servers, dedicated = topology.parties
    m, n = param.shape
    made = size.rows * row_bytes(size, m, n, coded=False)
    if scheme != "block":
        sent = 1 if scheme == "adam" else workers - 1
        return Load(sent * size.rows * row_bytes(size, m, n, coded=coded), made, (workers - 1) * made)
    part = (m / servers, n) if m >= n else (m, n / servers)
    pairs = max(workers, servers) if dedicated else workers + servers - 2  # half of them on the way out
    wire = pairs / 2 * size.rows * row_bytes(size, *part, coded=coded)
    return Load(wire, made, (workers - 1) * size.rows * row_bytes(size, *part, coded=False))


def up_seconds(param: Param, scheme: Scheme, size: FactorSize, rates: Rates, topology: Topology) -> tuple[float, bool]:
    """Seconds until factors are up, and whether they had better be coded for that.

    A coder works while the link carries, unless the device is the same processor and has to wait for it.
    """
    plain = load(param, scheme, size, topology, coded=False).wire / rates.link
    its = load(param, scheme, size, topology, coded=True)
    coding, wire = (its.made + its.used) / rates.code, its.wire / rates.link
    coded = wire + coding if rates.shared else max(wire, coding) + its.made / rates.code
    return (coded, True) if coded < plain else (plain, False)


def worth_coding(
    params: Sequence[Param],
    schemes: Mapping[str, Scheme],
    sizes: Mapping[str, FactorSize],
    topology: Topology,
    rates: Rates | None,
) -> list[str]:
    """The weights whose factors are coded.

    Args:
        rates: of the cluster; None: all whose factors are sparse, whatever that takes.
    """
    found = []
    for param in params:
        scheme, size = schemes.get(param.name, "ps"), sizes.get(param.name)
        if size is None or not size.rows or scheme not in ("sfb", "adam", "block"):
            continue
        if rates is None or up_seconds(param, scheme, size, rates, topology)[1]:
            found.append(param.name)
    return found


def coded_size(name: str, size: FactorSize, coded: Collection[str]) -> FactorSize:
    """As it counts on the wire: what is not coded is dense."""
    return size if name in coded else size._replace(u=1.0, v=1.0)
