"""The plan of a config, without starting anything.

The model is built and run once on PyTorch's meta device, which has shapes but neither memory nor arithmetic, with
the engine's own capture of factors: K is what each layer really sees (batch x positions), and a weight that the
engine would find tied or re-parametrised is found so here. Indices have no values there: an embedding's K is the most
rows that can be touched, min(tokens, rows of its weight), where the engine counts different ones, so that a real run
sends no more than planned for it, and may take rows where the plan says PS.
Alternatives were a table of layers per known model (blind to users' models) and a real iteration (minutes and
gigabytes for VGG19).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poseidon.config.density import densities
from poseidon.config.schema import ClusterConfig, Comm, Precision, Rule, Sparse, TrainConfig
from poseidon.errors import UserError
from poseidon.planning import (
    FACTORED,
    FactorSize,
    Topology,
    build_book,
    by_layer,
    decide,
    describe,
    read_plan,
    sharded_bytes,
    totals,
)
from poseidon.reporting.plan import Plan
from poseidon.tracking.summary import part_name

if TYPE_CHECKING:
    from poseidon.planning import Param, Recorded, Timing


def make_plan(config: TrainConfig) -> Plan:
    """The plan that the engine would adopt after iteration 0, if every node has ``trainer.batch_size`` rows.

    Raises:
        UserError: comm=single; a recorded plan that is none for this model on these nodes; or the model cannot be
            built, or cannot take the data set's rows.
    """
    comm, nodes = config.comm.name, config.cluster.nodes
    if comm is Comm.single:
        raise UserError("comm=single sends nothing, so there is nothing to plan; take another comm")
    infos, seen = _survey(config)
    topology = topology_of(config.cluster)
    by_rank = _per_device(seen, config.cluster.devices_per_node) * nodes
    timing, recorded = _timing(config), _recorded(config, infos, topology)
    decision = decide(
        comm.value,
        infos,
        by_rank,
        topology,
        timing if by_time(config) else None,
        config.comm.overlap.value,
        recorded,
        timing.rates if codes(config) and timing is not None else config.comm.sparse is Sparse.always,
    )
    book = build_book(
        infos,
        topology,
        kv_bytes=config.comm.kv_bytes,
        merge_bytes=config.comm.merge_bytes,
        schemes=decision.schemes,
    )
    ring = len(topology.workers) if nodes > 1 else 1  # through all devices; each node passes on what one of them sends
    if comm is Comm.ddp:
        sent = 2 * (ring - 1) / ring * sum(info.nbytes for info in infos)
    elif comm is Comm.fsdp:
        sent = sharded_bytes(((info.shape, info.itemsize, True) for info in infos), ring)
    else:
        homes = [*topology.nodes, *((rank,) for rank in topology.apart)]
        sent = max(
            sum(book.planned_bytes(rank, decision.factors, decision.sparse).between for rank in home) for home in homes
        )
    rows = by_layer(describe(book, decision.factors, 0))
    return Plan(
        model=part_name(config.model) or "?",
        comm=comm.value,
        rule=_rule(config, timing, recorded),
        nodes=nodes,
        devices_per_node=config.cluster.devices_per_node,
        batch_size=config.trainer.batch_size,
        parameters=sum(info.numel for info in infos),
        rows=rows,
        totals=totals(rows, nodes),
        bytes_sent_per_node=sent,
        rates=decision.rates,
        measures=by_time(config) and timing is None,
        sparse=decision.sparse,
    )


def _timing(config: TrainConfig) -> Timing | None:
    if config.hardware is None or not (by_time(config) or codes(config)):
        return None
    from poseidon.training.emulated import profiled  # which needs this module

    return profiled(config)


def _recorded(config: TrainConfig, infos: list[Param], topology: Topology) -> Recorded | None:
    if config.comm.plan is None or config.comm.name is not Comm.hybrid:
        return None
    found = read_plan(config.comm.plan)
    found.check(found.schemes, infos, topology)  # what else it has may be a frozen parameter's
    return found


def _rule(config: TrainConfig, timing: Timing | None, recorded: Recorded | None) -> str | None:
    """What hybrid's schemes follow from: where rates are measured when a training starts, here the papers' rule."""
    if config.comm.name is not Comm.hybrid:
        return None
    if recorded is not None:
        return "recorded"
    return Rule.paper.value if timing is None else Rule.time.value


def by_time(config: TrainConfig) -> bool:
    """Is there anything to choose by predicted time?"""
    comm = config.comm
    return comm.name is Comm.hybrid and comm.rule is Rule.time and comm.plan is None and config.cluster.nodes > 1


def codes(config: TrainConfig) -> bool:
    """Does it depend on known rates which factors are coded?"""
    comm, cluster = config.comm, config.cluster
    known = config.hardware is not None and (cluster.bandwidth is not None or bool(cluster.node_bandwidth))
    return known and comm.sparse is Sparse.auto and comm.name.value in FACTORED and cluster.nodes > 1


def topology_of(cluster: ClusterConfig) -> Topology:
    """Which ranks are on which node, and which of them serve."""
    return Topology.of([cluster.devices_per_node] * cluster.nodes, cluster.servers)


def _per_device(seen: dict[str, FactorSize], devices: int) -> list[dict[str, FactorSize]]:
    """What each device of a node sees of the node's rows."""
    return [
        {n: s._replace(rows=s.rows * (d + 1) // devices - s.rows * d // devices) for n, s in seen.items()}
        for d in range(devices)
    ]


def _survey(config: TrainConfig) -> tuple[list[Param], dict[str, FactorSize]]:
    """The trained parameters, and the factors of the layers that give them."""
    try:
        infos, seen = _observe(config, "meta")
    except UserError:
        raise
    except Exception:  # a model may want real numbers: then it gets them
        infos, seen = _observe(config, "cpu")
    if not infos:
        raise UserError(f"model: {_target(config)} has no parameter to train")
    return infos, as_trained(config, infos, seen)


def as_trained(config: TrainConfig, infos: list[Param], seen: dict[str, FactorSize]) -> dict[str, FactorSize]:
    """Of the factors that one plain backward pass gives, what the engine sees under the trainer's settings, as sparse
    as ``model.density`` says."""
    linear = {info.name for info in infos if info.factors == "linear"}
    if config.trainer.accumulate > 1:  # the gradient of several backward passes is no product of factors
        seen = {name: size for name, size in seen.items() if name not in linear}
    if config.trainer.precision is Precision.bf16:
        seen |= {name: size._replace(itemsize=2) for name, size in seen.items() if name in linear}
    shares = densities(config.model)
    layers = {info.name: info.layer for info in infos if info.name in linear and info.layer in shares}
    return seen | {
        name: seen[name]._replace(**shares[layer]._asdict()) for name, layer in layers.items() if name in seen
    }


def _observe(config: TrainConfig, device: str) -> tuple[list[Param], dict[str, FactorSize]]:
    import torch

    from poseidon.config.build import build
    from poseidon.engine.parameters import observe, trainable

    inputs = inputs_of_one_node(config, device, config.trainer.batch_size)
    with torch.device(device):
        model: Any = build(config.model, key="model")
        if not isinstance(model, torch.nn.Module):
            raise UserError(f"model: {_target(config)} gave {type(model).__name__}, must be a nn.Module")
        model.train()
        try:
            return trainable(model)[1], observe(model, lambda: model(inputs))
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            if device == "meta":
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"model: {_target(config)} cannot take the data set's rows: {reason}") from error


def inputs_of_one_node(config: TrainConfig, device: str, rows: int) -> Any:
    """The rows of one node: zeros of the shape that the data set's config tells, else the first real ones."""
    import torch

    from poseidon.config.build import build
    from poseidon.data import collate
    from poseidon.training.loader import to_device

    shape = config.dataset.get("shape")
    if shape is not None:
        dtype = getattr(torch, str(config.dataset.get("dtype") or "float32"))
        return torch.zeros(rows, *shape, dtype=dtype, device=device)
    train, _ = build(config.dataset, key="dataset")
    inputs, _ = collate([train[i % len(train)] for i in range(rows)])
    return to_device(inputs, torch.device(device))


def _target(config: TrainConfig) -> str:
    return str(config.model.get("_target_"))
