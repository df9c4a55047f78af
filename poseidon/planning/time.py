"""comm.rule=time: the schemes with which an iteration is predicted to take least, from measured or known rates.

The papers' rule counts floats. It overlooks that SFB multiplies P times what one machine would, and that what hides
under the backward pass costs nothing: where links are fast it slows training down.

Each choice changes what is left of the link for the others, so layers are not chosen one by one: from the best of the
plans that treat all alike, every combination of the few largest kinds of layers is tried, then single layers in turn.
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
from poseidon.planning.timeline import PIECES, ROUNDS, Overlap, Pass, Stage, iteration_seconds
from poseidon.planning.topology import Topology

CHOICES: tuple[Scheme, ...] = ("ps", "sfb", "block")
#: So much better a plan has to be to replace another; else the simpler one stays.
_BETTER = 1 - 1e-6
#: Likewise the papers' plan, by rates that were measured: they are a few percent off.
_CLEARLY = 1 - 0.03
#: Of a plan's communication, faster and slower than told: what a prediction is the mean of.
_SHAKEN = (1.0, 0.95, 1.05)
#: Kinds of layers of which every combination is tried, at most, and steps that are predicted in all: so that a choice
#: takes about a second at most.
_KINDS, _WORK = 5, 60_000


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
        copy: bytes/s between device and host, each way; None: no time.
        code: bytes/s of factors, before coding, that a host codes or decodes; of profiles what one core here does.
        source: "measured" or "profile".
    """

    link: float
    hop: float
    multiply: float
    add: float | None = None
    host: float | None = None
    shared: bool = False
    copy: float | None = None
    source: str = "measured"
    code: float = 1.5e9

    @staticmethod
    def least(each: Sequence[Rates]) -> Rates:
        """Of all nodes together: who is slowest is waited for."""
        first = each[0]
        known = zip(*((r.add, r.host, r.copy) for r in each), strict=True)
        add, host, copy = (min((rate for rate in rates if rate), default=None) for rates in known)
        return Rates(
            min(r.link for r in each),
            max(r.hop for r in each),
            min(r.multiply for r in each),
            add,
            host,
            first.shared,
            copy,
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
    papers: Mapping[str, Scheme] | None = None,
    *,
    sparse: bool = False,
) -> dict[str, Scheme]:
    """The scheme of each linear layer's weight.

    Args:
        params: all, in the model's order.
        sizes: of the factors per node, by name of the weights that may go otherwise than by PS.
        papers: what stays if, by measured rates, no other plan is clearly better.
        sparse: factors may be coded, where that is predicted to bring them up earlier.
    """
    if not sparse:
        sizes = {name: size._replace(u=1.0, v=1.0) for name, size in sizes.items()}
    predictor = _Predictor(params, sizes, timing, topology, overlap)
    names = sorted(sizes, key=lambda name: -predictor.params[name].numel)
    best: dict[str, Scheme] = dict.fromkeys(names, "ps")
    least = predictor.seconds(best)

    def attempt(plans: Iterable[dict[str, Scheme]]) -> bool:
        nonlocal best, least
        before = least
        for plan in plans:
            if predictor.work > 0 and (took := predictor.seconds(plan, least * _BETTER)) < least * _BETTER:
                best, least = plan, took
        return least < before

    attempt(dict.fromkeys(names, scheme) for scheme in CHOICES[1:])
    kinds = _kinds(names, predictor.params, sizes)
    # Half of the work is left for single layers.
    while len(kinds) > _KINDS or (len(kinds) > 1 and len(CHOICES) ** len(kinds) * predictor.price > _WORK / 2):
        kinds.pop()
    attempt(
        [
            best | {name: scheme for kind, scheme in zip(kinds, each, strict=True) for name in kind}
            for each in product(CHOICES, repeat=len(kinds))
        ]
    )
    better = True
    while better:
        better = attempt(best | {name: scheme} for name in names for scheme in CHOICES if scheme != best[name])
    if papers is not None and timing.rates.source == "measured" and least > predictor.seconds(papers) * _CLEARLY:
        return {name: papers.get(name, "ps") for name in names}
    return best


def _kinds(names: Iterable[str], params: Mapping[str, Param], sizes: Mapping[str, FactorSize]) -> list[list[str]]:
    """Layers that are alike, together, those first that have most parameters in all."""
    kinds: dict[Any, list[str]] = {}
    for name in names:
        size = sizes[name]
        kind = params[name].shape, params[name].itemsize, size.rows, size.itemsize, round(size.u, 1), round(size.v, 1)
        kinds.setdefault(kind, []).append(name)
    return sorted(kinds.values(), key=lambda kind: -len(kind) * params[kind[0]].numel)


class _Predictor:
    """Seconds of an iteration under a plan: the mean over communication that is as fast as the rates say, and somewhat
    faster and slower. At one speed alone, a large copy that by luck just misses an urgent small one makes a plan look
    better than its neighbours by what it then loses to them in fact.

    Attributes:
        params: by name.
        price: of predicting an iteration once.
        work: that is left to be spent.
    """

    def __init__(
        self,
        params: Sequence[Param],
        sizes: Mapping[str, FactorSize],
        timing: Timing,
        topology: Topology,
        overlap: Overlap,
    ) -> None:
        self.params = {param.name: param for param in params}
        self.price = len(params) * ROUNDS + PIECES if overlap == "full" else len(params)
        self.work = _WORK
        self._timing, self._overlap = timing, overlap
        self._passes: dict[tuple[str, Scheme], list[Pass]] = {}  # as many as speeds
        for param in params:
            for scheme in CHOICES if param.name in sizes else CHOICES[:1]:
                size = sizes.get(param.name)
                stage = _stage(param, scheme, size, timing.rates, topology)
                saved = 0.0 if scheme == "ps" or size is None else _flops(param, size) / timing.rates.multiply
                backward = max(0.0, timing.backward.get(param.name, 0.0) - saved)
                self._passes[param.name, scheme] = [
                    Pass(timing.forward.get(param.name, 0.0), backward, stage.slower(factor)) for factor in _SHAKEN
                ]

    def seconds(self, plan: Mapping[str, Scheme], least: float = math.inf) -> float:
        """Or more than `least`."""
        each = [self._passes[name, plan.get(name, "ps")] for name in self.params]
        total = 0.0
        for i in range(len(_SHAKEN)):
            self.work -= self.price
            total += iteration_seconds([passes[i] for passes in each], self._overlap)
            if not i and total * min(_SHAKEN) > least:
                return total
        return total / len(_SHAKEN)


def _flops(param: Param, size: FactorSize) -> float:
    """FLOPs of one node's product of factors."""
    return 2.0 * size.rows * param.numel


def _stage(param: Param, scheme: Scheme, size: FactorSize | None, rates: Rates, topology: Topology) -> Stage:
    """What follows a layer's backward pass, at the node that has most to do."""
    workers, servers, dedicated = topology.parties
    devices = max(map(len, topology.nodes))
    # Of each matrix a host adds up, or multiplies, its share for every worker.
    share = max(1.0, workers / servers)
    added = share * param.nbytes / rates.add if rates.add else 0.0
    copied = 1 / rates.copy if rates.copy else 0.0
    if scheme == "ps" or size is None:
        wire = ps_busiest_floats(param.numel, 1, workers, servers, dedicated) / 2 * param.itemsize / rates.link
        copy = copied * param.nbytes
        # Piece by piece, so that what a host adds hides under what the link carries, unless the device waits for it.
        if rates.shared:
            return Stage(wire + added, hop=2 * rates.hop, copy_out=copy, copy_in=copy)
        return Stage(wire, added, "beside", hop=2 * rates.hop, copy_out=copy, copy_in=copy)
    (m, n), flops = param.shape, _flops(param, size)
    own = size.rows * (m + n) * size.itemsize * copied
    up, _ = up_seconds(param, scheme, size, rates, topology)
    if scheme == "sfb":
        product, others = workers * flops / rates.multiply / devices, workers - 1
        return Stage(up, product, hop=rates.hop, late=True, copy_out=own, copy_in=others * own)
    down = block_floats(m, n, 0, workers, servers, dedicated) / 2 * param.itemsize / rates.link
    if rates.shared:
        return Stage(up, share * flops / rates.multiply, "device", down, rates.hop)
    product = share * flops / rates.host if rates.host else added
    return Stage(up, product, "host", down, rates.hop, copy_out=own, copy_in=copied * param.nbytes)
