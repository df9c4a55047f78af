"""What is simulated: a model's iteration on one machine, a network of such machines, and how they communicate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from poseidon.planning import FactorSize, Overlap, Param, Rates, Timing

Comm = Literal["single", "ps", "sfb", "block", "hybrid", "ddp", "fsdp"]
MIB = 1024 * 1024


@dataclass(frozen=True)
class Layer:
    """One call of a layer in a forward pass.

    Attributes:
        params: names of the parameters that it uses.
        forward, backward: seconds.
        product: seconds of the local weight-gradient product u^T v, a part of `backward`; 0: it has no factors.
    """

    name: str
    params: tuple[str, ...]
    forward: float
    backward: float
    product: float = 0.0


@dataclass(frozen=True)
class Job:
    """An iteration of one machine.

    Attributes:
        layers: in the order of the forward pass.
        params: in the model's order.
        factors: of each weight that can travel otherwise than whole, what one machine sees of it.
        step: seconds of the optimizer step.
        host_copy: bytes/s between device and host, each way; None: copies take no time.
        server_sum: bytes/s that a host adds up; None: sums take no time.
    """

    layers: tuple[Layer, ...]
    params: tuple[Param, ...]
    factors: Mapping[str, FactorSize] = field(default_factory=dict)
    step: float = 0.0
    host_copy: float | None = None
    server_sum: float | None = None

    @property
    def seconds(self) -> float:
        """Of an iteration of one machine that communicates with nobody."""
        return sum(layer.forward + layer.backward for layer in self.layers) + self.step


@dataclass(frozen=True)
class Network:
    """Symmetric nodes, one device each, on full-duplex links.

    Attributes:
        nodes: all of them workers and servers.
        rate: bits/s of each node's link, each way; None: transfers take no time but the hop.
        goodput: share of the rate that payload gets; the rest are headers of full packets (TCP, IP, Ethernet).
        hop: seconds from one host's software to another's, beside what the rate costs.
    """

    nodes: int
    rate: float | None
    goodput: float = 0.957
    hop: float = 100e-6


@dataclass(frozen=True)
class System:
    """How gradients are made global.

    Attributes:
        overlap: ``none`` (all communication after the backward pass), ``backward`` (layer by layer under it), or
            ``full`` (also under the next forward pass, which goes on layer by layer; what the front layers wait for
            goes first). Of ``ps``, ``sfb``, ``block`` and ``hybrid`` only.
        rule: how ``hybrid`` chooses: ``paper`` or ``time``, by what :func:`timing_of` tells.
        sparse: ``auto`` (factors are coded where that pays), ``always`` or ``never``; coding takes no time here.
        kv_bytes, merge_bytes: of the book, see :func:`poseidon.planning.build_book`.
        bucket_bytes, first_bucket_bytes: of ``ddp``: of its buckets, and of the first one.
    """

    comm: Comm
    overlap: Overlap = "backward"
    rule: Literal["paper", "time"] = "paper"
    sparse: Literal["auto", "always", "never"] = "never"
    kv_bytes: int = 2 * MIB
    merge_bytes: int = 64 * 1024
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB


def timing_of(job: Job, network: Network) -> Timing:
    """What comm.rule=time goes by on such nodes."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    flops = products = 0.0
    numel = {param.name: param.numel for param in job.params}
    for layer in job.layers:
        if layer.params:
            name = layer.params[0]
            forward[name] = forward.get(name, 0.0) + layer.forward
            backward[name] = backward.get(name, 0.0) + layer.backward
        products += layer.product
        flops += sum(
            2.0 * job.factors[name].rows * numel[name] for name in layer.params if name in job.factors and layer.product
        )
    rates = Rates(
        link=network.rate * network.goodput / 8 if network.rate else float("inf"),
        hop=network.hop,
        multiply=flops / products if products else float("inf"),
        add=job.server_sum,
        copy=job.host_copy,
        source="profile",
    )
    return Timing(rates, backward, forward)
