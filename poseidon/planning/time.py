"""comm.rule=time: the schemes with which an iteration is predicted to take least, from measured or known rates.

The papers' rule counts floats. It overlooks that SFB multiplies P times what one machine would, and that what hides
under the backward pass costs nothing: where links are fast it slows training down.

Each choice changes what is left of the link for the others, so layers are not chosen one by one: from the best of the
plans that treat all alike, every combination of the few largest layers is tried, then each of the others in turn.
Alternatives: the others' way for all, which ends at AlexNet's 10 GbE 2 % above the best; all 3^n plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from poseidon.planning.book import FactorSize, Param
from poseidon.planning.cost import Scheme, block_floats, ps_busiest_floats
from poseidon.planning.sparse import up_seconds
from poseidon.planning.timeline import Overlap, Pass, Stage, iteration_seconds
from poseidon.planning.topology import Topology

CHOICES: tuple[Scheme, ...] = ("ps", "sfb", "block")
#: So much better a plan has to be to replace another; else the simpler one stays.
_BETTER = 1 - 1e-6
#: Layers of which every combination is tried, and iterations that are predicted for the others, at most.
_LARGEST, _TRIES = 5, 500


@dataclass(frozen=True)
class Rates:
    """What a node of the cluster can do; of unequal nodes, the least.

    Attributes:
        link: bytes/s that leave a node while as many enter it, software included.
        hop: seconds until a short message is there.
        multiply: FLOP/s of a device; infinite where nobody has asked.
        add: bytes/s of gradients that a host adds up; None: no time.
        host: FLOP/s of an owner's host; None: of no account, `add` tells its time.
        shared: host and device are the same processor.
        code: bytes/s of factors, before coding, that a host codes or decodes; of profiles what one core here does.
        source: "measured" or "profile".
    """

    link: float
    hop: float
    multiply: float
    add: float | None = None
    host: float | None = None
    shared: bool = False
    source: str = "measured"
    code: float = 1.5e9

    @staticmethod
    def least(each: Sequence[Rates]) -> Rates:
        """Of all nodes together: who is slowest is waited for."""
        first = each[0]
        adds, hosts = ([rate for rate in rates if rate] for rates in zip(*((r.add, r.host) for r in each), strict=True))
        return Rates(
            min(r.link for r in each),
            max(r.hop for r in each),
            min(r.multiply for r in each),
            min(adds, default=None),
            min(hosts, default=None),
            first.shared,
            first.source,
            min(r.code for r in each),
        )

    def as_dict(self) -> dict[str, Any]:
        """For records: what nobody has measured is null."""
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Timing:
    """What the rule goes by.

    Attributes:
        backward: seconds of the backward pass, by name of the parameter whose gradient is final at its end; what is
            missing takes none.
        forward: likewise.
    """

    rates: Rates
    backward: Mapping[str, float]
    forward: Mapping[str, float]


def choose(
    params: Sequence[Param],
    sizes: Mapping[str, FactorSize],
    timing: Timing,
    topology: Topology,
    overlap: Overlap,
    *,
    sparse: bool = False,
) -> dict[str, Scheme]:
    """The scheme of each linear layer's weight.

    Args:
        params: all, in the model's order.
        sizes: of the factors per node, by name of the weights that may go otherwise than by PS.
        sparse: factors may be coded, where that is predicted to bring them up earlier.
    """
    stages = {
        (param.name, scheme): _stage(param, scheme, sizes.get(param.name), timing.rates, topology, sparse=sparse)
        for param in params
        for scheme in (CHOICES if param.name in sizes else CHOICES[:1])
    }

    def seconds(plan: Mapping[str, Scheme]) -> float:
        passes = []
        for param in params:
            scheme = plan.get(param.name, "ps")
            saved = 0.0 if scheme == "ps" else _flops(param, sizes[param.name]) / timing.rates.multiply
            backward = max(0.0, timing.backward.get(param.name, 0.0) - saved)
            passes.append(Pass(timing.forward.get(param.name, 0.0), backward, stages[param.name, scheme]))
        return iteration_seconds(passes, overlap)

    numel = {param.name: param.numel for param in params}
    names = sorted(sizes, key=lambda name: -numel[name])
    best: dict[str, Scheme] = dict.fromkeys(names, "ps")
    least = seconds(best)

    def attempt(plans: Iterable[dict[str, Scheme]]) -> bool:
        nonlocal best, least
        before = least
        for plan in plans:
            if (took := seconds(plan)) < least * _BETTER:
                best, least = plan, took
        return least < before

    attempt(dict.fromkeys(names, scheme) for scheme in CHOICES[1:])
    largest, rest = names[:_LARGEST], names[_LARGEST:]
    attempt([best | dict(zip(largest, each, strict=True)) for each in product(CHOICES, repeat=len(largest))])
    sweeps = _TRIES // (2 * len(rest)) if rest else 0
    for _ in range(sweeps):
        better = [attempt([best | {name: scheme} for scheme in CHOICES if scheme != best[name]]) for name in rest]
        if not any(better):
            break
    return best


def _flops(param: Param, size: FactorSize) -> float:
    """FLOPs of one node's product of factors."""
    return 2.0 * size.rows * param.numel


def _stage(
    param: Param, scheme: Scheme, size: FactorSize | None, rates: Rates, topology: Topology, *, sparse: bool = False
) -> Stage:
    """What follows a layer's backward pass, at the node that has most to do."""
    workers, servers, dedicated = topology.parties
    devices = max(map(len, topology.nodes))
    # Of each matrix a host adds up, or multiplies, its share for every worker.
    share = max(1.0, workers / servers)
    added = share * param.nbytes / rates.add if rates.add else 0.0
    if scheme == "ps" or size is None:
        wire = ps_busiest_floats(param.numel, 1, workers, servers, dedicated) / 2 * param.itemsize / rates.link
        # Piece by piece, so that what a host adds hides under what the link carries, unless the device waits for it.
        return Stage(wire + added if rates.shared else max(wire, added), hop=2 * rates.hop)
    (m, n), flops = param.shape, _flops(param, size)
    up, _ = up_seconds(param, scheme, size if sparse else size._replace(u=1.0, v=1.0), rates, topology)
    if scheme == "sfb":
        return Stage(up, workers * flops / rates.multiply / devices, hop=rates.hop, late=True)
    down = block_floats(m, n, 0, workers, servers, dedicated) / 2 * param.itemsize / rates.link
    if rates.shared:
        return Stage(up, share * flops / rates.multiply, "device", down, rates.hop)
    return Stage(up, share * flops / rates.host if rates.host else added, "host", down, rates.hop)
