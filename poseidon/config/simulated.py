"""What `poseidon simulate` takes beyond a training's config: lists of cells, and which trainings it can simulate."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from poseidon.config.paths import conf_dir
from poseidon.config.schema import Comm, CommConfig, Overlap, Rule, SimulateConfig, Sparse
from poseidon.config.units import parse_rate, parse_seconds
from poseidon.errors import UserError

#: After a choice of comm: hides under the next forward pass too; after ddp: has buckets of so many MiB.
FULL = "+full"
_BUCKET = re.compile(r"\+([1-9]\d*)mib$")
_OWN = (Comm.ps, Comm.sfb, Comm.block, Comm.hybrid)


@dataclass(frozen=True)
class Variant:
    """A system to be simulated.

    Attributes:
        name: as the user writes it.
    """

    name: str
    comm: CommConfig


def check_simulate(config: SimulateConfig) -> None:
    """Raises UserError, in one line, for what cannot be simulated; ``check_train`` comes before."""
    options = config.simulate
    if config.hardware is None:
        raise UserError(
            "hardware: a simulation needs a profile's times: hardware=titan_x, k20, or what `poseidon profile` measured"
        )
    _check_symmetric(config)
    node_counts(config)
    rates(config)
    batch_sizes(config)
    variants(config)
    parse_seconds("simulate.hop", options.hop)
    if not 0 < options.goodput <= 1:
        raise UserError(f"simulate.goodput={options.goodput}: is a share of the rate, must be above 0 and at most 1")


def node_counts(config: SimulateConfig) -> list[int]:
    """Ascending. Raises UserError."""
    given = config.simulate.nodes
    if given is None:
        return [config.cluster.nodes]
    if not given or min(given) < 1:
        raise UserError(f"simulate.nodes={given}: must be numbers of nodes, at least 1, such as [1,2,4,8]")
    return sorted(set(given))


def batch_sizes(config: SimulateConfig) -> list[int]:
    """Ascending. Raises UserError."""
    given = config.simulate.batch_sizes
    if given is None:
        return [config.trainer.batch_size]
    if not given or min(given) < 1:
        raise UserError(f"simulate.batch_sizes={given}: must be rows per node, at least 1, such as [64,256,1024]")
    return sorted(set(given))


#: What no simulated system does.
_NOT = {
    Comm.project_adam: "an owner of layers, who has more to do than others,",
    Comm.downpour: "going on without waiting",
}


def rates(config: SimulateConfig) -> dict[str, float]:
    """Bits/s by the text that says so, ascending. Raises UserError."""
    given = config.simulate.rates
    if given is None:
        if config.cluster.bandwidth is None:
            raise UserError("cluster.bandwidth=null: a simulated link needs a rate, such as 10gbit")
        return {config.cluster.bandwidth: parse_rate("cluster.bandwidth", config.cluster.bandwidth)}
    if not given:
        raise UserError("simulate.rates=[]: must be rates, such as [1gbit,10gbit]")
    found = {text: parse_rate("simulate.rates", text) for text in given}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def variants(config: SimulateConfig) -> list[Variant]:
    """The systems, in the order given. Raises UserError."""
    given = config.simulate.comms
    if given is None:
        found = [Variant(_named(config.comm), config.comm)]
    elif given:
        found = [_variant(config.comm, name) for name in dict.fromkeys(given)]
    else:
        raise UserError("simulate.comms=[]: must be choices of comm, such as [ps,hybrid,ddp]")
    for variant in found:
        why = _NOT.get(variant.comm.name)
        if why is not None:
            key = "comm" if given is None else "simulate.comms"
            raise UserError(f"{key}={variant.name}: {why} is not simulated; leave it out")
        if variant.comm.name is Comm.hybrid and variant.comm.plan is not None:
            raise UserError(f"comm.plan={variant.comm.plan}: recorded plans are not simulated; leave it out")
        if variant.comm.overlap is Overlap.full and variant.comm.name not in _OWN:
            raise UserError(
                f"simulate.comms={variant.name}: only ps, sfb, block and hybrid can hide under the next forward pass"
            )
    return found


def _named(comm: CommConfig) -> str:
    full = FULL if comm.name in _OWN else ""
    suffix = {Overlap.none: ", overlap=none", Overlap.backward: "", Overlap.full: full}
    return f"{comm.name}{suffix[comm.overlap]}"


def _variant(comm: CommConfig, name: str) -> Variant:
    bucket = _BUCKET.search(name)
    choice = name.removesuffix(FULL) if bucket is None else name[: bucket.start()]
    known = sorted(file.stem for file in (conf_dir() / "comm").glob("*.yaml"))
    if choice not in known:
        near = difflib.get_close_matches(choice, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"simulate.comms={name}: {hint}known are {', '.join(known)}; ps+full, hybrid+full, ddp+1mib")
    yaml: Any = import_module("yaml")  # has no types
    said = yaml.safe_load((conf_dir() / "comm" / f"{choice}.yaml").read_text(encoding="utf-8"))
    chosen = replace(
        comm,
        name=Comm[said["name"]],
        overlap=Overlap.full if name.endswith(FULL) else Overlap[said.get("overlap", "backward")],
        rule=Rule[said.get("rule", comm.rule.name)],
        sparse=Sparse[said.get("sparse", comm.sparse.name)],
    )
    if bucket is None:
        return Variant(name, chosen)
    if chosen.name is not Comm.ddp:
        raise UserError(f"simulate.comms={name}: only ddp has buckets")
    return Variant(name, replace(chosen, ddp=replace(chosen.ddp, bucket_cap_mb=float(bucket[1]))))


def _check_symmetric(config: SimulateConfig) -> None:
    cluster = config.cluster
    for key, value, plain in (
        ("cluster.devices_per_node", cluster.devices_per_node, 1),
        ("cluster.servers", cluster.servers, None),
        ("cluster.batch_shares", cluster.batch_shares, None),
        ("cluster.node_bandwidth", cluster.node_bandwidth, {}),
        ("cluster.straggler.delay", cluster.straggler.delay, None),
        ("comm.staleness", config.comm.staleness, 0),
        ("trainer.accumulate", config.trainer.accumulate, 1),
        ("trainer.global_batch", config.trainer.global_batch, None),
    ):
        if value != plain:
            raise UserError(
                f"{key}={value}: is not simulated: all nodes are the same, with one device each, and in lock-step; "
                f"leave it out"
            )
