"""One plan at work: which unit goes by which scheme, and what carries it out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from poseidon.engine.capture import Record
from poseidon.engine.device import Device
from poseidon.engine.exchange import Exchange
from poseidon.engine.gradients import Gradients
from poseidon.engine.server import make_book, tell_servers
from poseidon.engine.syncers import Syncers
from poseidon.engine.traced import TracedSyncers
from poseidon.planning import Param, Scheme
from poseidon.schemes import depth_of


@dataclass(frozen=True)
class Options:
    """How one model is made data-parallel; equal on all ranks."""

    comm: str = "hybrid"  # ps | sfb | hybrid | block | project_adam
    overlap: Literal["none", "backward", "full"] = "backward"
    rows: str = "leading"  # leading | equal
    kv_bytes: int = 2 * 1024 * 1024
    merge_bytes: int = 64 * 1024
    staleness: int = 0
    staleness_mode: str = "newest"  # newest | fixed
    rule: str = "time"  # paper | time
    replays: bool = False  # a recorded plan
    sparse: str = "auto"  # auto | always | never


class Plan:
    """From its first round to the next plan.

    Attributes:
        version: even: everything goes by PS, for one round; odd: what rank 0 decided then.
        rounds: closed under it.
    """

    def __init__(
        self,
        exchange: Exchange,
        index: int,
        version: int,
        infos: Sequence[Param],
        params: Sequence[nn.Parameter],
        records: dict[int, Record],
        schemes: Mapping[str, Scheme],
        options: Options,
        device: Device,
        sparse: Collection[str] = (),
    ) -> None:
        self.version, self.rounds = version, 0
        sizes = {"kv_bytes": options.kv_bytes, "merge_bytes": options.merge_bytes, "staleness": options.staleness}
        self.book = make_book(exchange, infos, schemes, **sizes)
        dtypes = [p.dtype for p in params]
        depth = depth_of(options.staleness)
        front = options.overlap == "full"
        make = Syncers if exchange.tracer is None else partial(TracedSyncers, exchange.tracer)
        self.syncers = make(
            exchange,
            index,
            version,
            self.book,
            dtypes,
            options.kv_bytes,
            depth,
            device=device,
            sparse=sparse,
            front=front,
        )
        tell_servers(exchange, index, version, self.book, {**sizes, "front": front})
        self.gradients = Gradients(
            self.book, params, records, device, depth, counted=self.trial and options.sparse != "never"
        )
        for number, record in records.items():
            record.active = self.trial or schemes.get(infos[number].name, "ps") != "ps"

    @property
    def trial(self) -> bool:
        """Is this a plan by PS, under which the rows of the layers are found out?"""
        return self.version % 2 == 0
