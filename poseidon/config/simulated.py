"""What `poseidon simulate` takes beyond a training's config: lists of cells, and which trainings it can simulate."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from poseidon.config.paths import conf_dir
from poseidon.config.schema import Comm, CommConfig, Overlap, Rule, SimulateConfig
from poseidon.config.units import parse_rate, parse_seconds
from poseidon.errors import UserError

#: After a choice of comm: hides under the next forward pass too.
FULL = "+full"
_OWN = (Comm.ps, Comm.sfb, Comm.hybrid)


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


#: What no simulated system does.
_NOT = {
    Comm.project_adam: "an owner of layers, who has more to do than others,",
    Comm.block: "multiplying blocks on their owners' hosts",
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
            said = variant.comm.name if given is None else variant.name
            raise UserError(f"{key}={said}: {why} is not simulated; leave it out")
        if variant.comm.name is Comm.hybrid and variant.comm.rule is Rule.time:
            raise UserError("comm.rule=time: only the papers' rule is simulated; set comm.rule=paper")
        if variant.comm.overlap is Overlap.full and variant.comm.name not in _OWN:
            raise UserError(
                f"simulate.comms={variant.name}: only ps, sfb and hybrid can hide under the next forward pass"
            )
    return found


def _named(comm: CommConfig) -> str:
    suffix = {Overlap.none: ", overlap=none", Overlap.backward: "", Overlap.full: FULL}
    return f"{comm.name}{suffix[comm.overlap]}"


def _variant(comm: CommConfig, name: str) -> Variant:
    choice = name.removesuffix(FULL)
    known = sorted(file.stem for file in (conf_dir() / "comm").glob("*.yaml"))
    if choice not in known:
        near = difflib.get_close_matches(choice, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"simulate.comms={name}: {hint}known are {', '.join(known)}; ps+full and hybrid+full")
    yaml: Any = import_module("yaml")  # has no types
    said = yaml.safe_load((conf_dir() / "comm" / f"{choice}.yaml").read_text(encoding="utf-8"))
    chosen = replace(
        comm,
        name=Comm[said["name"]],
        overlap=Overlap.full if choice != name else Overlap[said.get("overlap", "backward")],
        rule=Rule[said.get("rule", comm.rule.name)],
    )
    return Variant(name, chosen)


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
