"""What a schema cannot say: ranges, keys that contradict each other, targets that do not exist."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from poseidon.config.density import densities
from poseidon.config.profiles import check_hardware
from poseidon.config.schema import (
    AUTO,
    OPEN_GROUPS,
    ClusterConfig,
    ClusterKind,
    Comm,
    Device,
    Overlap,
    Part,
    Precision,
    ProfileConfig,
    StragglerConfig,
    TrainConfig,
    ValidateConfig,
)
from poseidon.config.shares import cut
from poseidon.config.targets import check_target
from poseidon.config.units import parse_rate, parse_seconds
from poseidon.errors import UserError

#: Smallest values; null passes where the type allows it.
_AT_LEAST = {
    "cluster.nodes": 1,
    "cluster.devices_per_node": 1,
    "cluster.threads": 1,
    "comm.kv_bytes": 1024,
    "comm.merge_bytes": 0,
    "comm.staleness": 0,
    "trainer.batch_size": 1,
    "trainer.global_batch": 1,
    "trainer.iterations": 1,
    "trainer.accumulate": 1,
    "trainer.workers": 0,
    "trainer.eval_every": 0,
    "trainer.eval_batch_size": 1,
    "trainer.checkpoint_every": 0,
    "trainer.check_every": 0,
    "trainer.log_every": 1,
    "trainer.warmup": 1,
}
_POSITIVE = ("comm.timeout", "comm.ddp.bucket_cap_mb", "trainer.epochs", "trainer.clip_norm", "trainer.target_accuracy")
#: Largest message of the transport, in bytes.
MOST_KV_BYTES = 64 * 1024 * 1024
#: Keys of the cluster that mean something where the network is emulated only.
_EMULATED = ("bandwidth", "node_bandwidth", "latency", "time_dilation")
_STRAGGLER = ("delay", "probability", "node")
_INTERVALS = ("epoch", "iteration")
#: Arguments of torch's schedules that conf/ takes from trainer.epochs.
_LENGTHS = ("T_max", "total_iters")


def check_train(config: TrainConfig) -> None:
    """Raises UserError in one line if the config cannot run; imports no torch and none of the targets."""
    _check_ranges(config)
    _check_trace(config)
    check_cluster(config.cluster)
    _check_shares(config)
    _check_servers(config)
    _check_contradictions(config)
    _check_dataset(config.dataset)
    densities(config.model)
    if config.hardware is not None:
        check_hardware(config.hardware)
        if not isinstance(config, ProfileConfig):
            _check_emulated(config)
    for group in OPEN_GROUPS:
        node = getattr(config, group)
        if group == "schedule" and node.get("_target_") is None:
            continue  # constant
        check_target(group, Part.of(group, node).arguments())
    _check_optimizer(config.optimizer)
    _check_schedule(config.schedule)


def check_validate(config: ValidateConfig) -> None:
    """Raises UserError in one line if there is nothing that could be measured."""
    cluster, seconds = config.cluster, config.validate.seconds
    if cluster.name is not ClusterKind.emulated:
        raise UserError(f"cluster={cluster.name.value}: poseidon validate measures emulated networks: cluster=emulated")
    if cluster.nodes < 2:
        raise UserError(f"cluster.nodes={cluster.nodes}: must be at least 2 for a network between them")
    if not 0 < seconds < math.inf:
        raise UserError(f"validate.seconds={seconds}: must be greater than 0")
    check_cluster(cluster)
    if cluster.time_dilation == AUTO:
        raise UserError(f"cluster.time_dilation={AUTO}: follows from a training; here, try numbers from 1 on")


def _check_ranges(config: TrainConfig) -> None:
    for key, least in _AT_LEAST.items():
        value = _select(config, key)
        if value is not None and value < least:
            raise UserError(f"{key}={value}: must be at least {least}")
    for key in _POSITIVE:
        value = _select(config, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{key}={value}: must be greater than 0")
    if config.comm.kv_bytes > MOST_KV_BYTES:
        raise UserError(f"comm.kv_bytes={config.comm.kv_bytes}: must be at most {MOST_KV_BYTES}")
    target = config.trainer.target_accuracy
    if target is not None and target > 1:
        raise UserError(
            f"trainer.target_accuracy={target}: is a fraction, at most 1; for {target:g} % write {target / 100:g}"
        )


def _check_trace(config: TrainConfig) -> None:
    trace, last = config.trainer.trace, config.trainer.iterations
    shown = f"trainer.trace={str(trace).replace(' ', '')}"
    for iteration in trace or ():
        if iteration < 1:
            raise UserError(f"{shown}: iterations are counted from 1, there is none {iteration}")
        if last is not None and iteration > last:
            raise UserError(
                f"{shown}: there is no iteration {iteration}, the run ends with {last} (trainer.iterations)"
            )


def _check_shares(config: TrainConfig) -> None:
    shares, nodes = config.cluster.batch_shares, config.cluster.nodes
    if shares is None:
        return
    if len(shares) != nodes or not all(0 < share < math.inf for share in shares):
        raise UserError(
            f"cluster.batch_shares={shares}: must be a positive number for each of the {nodes} nodes (cluster.nodes)"
        )
    rows = nodes * config.trainer.batch_size
    for node in range(nodes):
        its = len(cut(rows, node, shares))
        if its < config.cluster.devices_per_node:
            left = f"{its} row{'s' if its > 1 else ''}" if its else "no row"
            raise UserError(
                f"cluster.batch_shares={shares}: leaves node {node} {left} of the global batch of {rows} "
                f"(cluster.nodes x trainer.batch_size), and each of its devices needs one"
            )


def _check_servers(config: TrainConfig) -> None:
    servers, nodes, comm = config.cluster.servers, config.cluster.nodes, config.comm.name
    if servers is None:
        return
    count = isinstance(servers, int) and not isinstance(servers, bool) and servers >= 1
    some = isinstance(servers, list) and servers and all(type(node) is int and 0 <= node < nodes for node in servers)
    if not (count or some):
        raise UserError(
            f"cluster.servers={servers}: must be a number of nodes that only serve, at least 1, or a list of worker "
            f"nodes that serve, from 0 to {nodes - 1} (cluster.nodes)"
        )
    if comm is Comm.single or comm.of_torch:
        raise UserError(f"cluster.servers={servers}: comm={comm.value} has no parameter server; leave it out")
    if comm is Comm.downpour and count:
        raise UserError(
            f"cluster.servers={servers}: comm=downpour keeps its shards on worker nodes; give a list of those, or "
            f"leave it out"
        )


def check_cluster(cluster: ClusterConfig) -> None:
    """Raises UserError in one line if the network that is asked for makes no sense."""
    if cluster.name is not ClusterKind.emulated:
        for name in _EMULATED:
            if getattr(cluster, name) != getattr(ClusterConfig(), name):
                raise UserError(
                    f"cluster.{name}={getattr(cluster, name)}: is for cluster=emulated only; with "
                    f"cluster={cluster.name.value} the network is the real one"
                )
        for name in _STRAGGLER:
            value = getattr(cluster.straggler, name)
            if value != getattr(StragglerConfig(), name):
                raise UserError(
                    f"cluster.straggler.{name}={value}: is for cluster=emulated only; with "
                    f"cluster={cluster.name.value} nodes are as fast as they are"
                )
        return
    if cluster.bandwidth is not None:
        parse_rate("cluster.bandwidth", cluster.bandwidth)
    for node, rate in cluster.node_bandwidth.items():
        if node not in range(cluster.nodes + cluster.dedicated):
            last = cluster.nodes + cluster.dedicated - 1
            raise UserError(f"cluster.node_bandwidth.{node}: there are nodes 0 to {last} (cluster.nodes)")
        parse_rate(f"cluster.node_bandwidth.{node}", rate)
    if cluster.latency is not None:
        parse_seconds("cluster.latency", cluster.latency)
    _check_straggler(cluster)
    dilation = cluster.time_dilation
    if dilation != AUTO and not (isinstance(dilation, float) and 1 <= dilation < math.inf):
        raise UserError(f"cluster.time_dilation={dilation}: must be a number, at least 1, or {AUTO}")


def _check_straggler(cluster: ClusterConfig) -> None:
    straggler = cluster.straggler
    if straggler.delay is None:
        for name in ("probability", "node"):
            value = getattr(straggler, name)
            if value != getattr(StragglerConfig(), name):
                raise UserError(f"cluster.straggler.{name}={value}: does nothing without cluster.straggler.delay")
        return
    parse_seconds("cluster.straggler.delay", straggler.delay)
    if not 0 < straggler.probability <= 1:
        raise UserError(
            f"cluster.straggler.probability={straggler.probability}: is a share of the iterations, must be greater "
            f"than 0 and at most 1"
        )
    if straggler.node is not None and straggler.node not in range(cluster.nodes):
        raise UserError(
            f"cluster.straggler.node={straggler.node}: there are worker nodes 0 to {cluster.nodes - 1} (cluster.nodes)"
        )


def _check_contradictions(config: TrainConfig) -> None:
    trainer, comm = config.trainer, config.comm
    if trainer.epochs is None and trainer.iterations is None:
        raise UserError("trainer.epochs and trainer.iterations are both null: at least one must say when the run ends")
    if trainer.global_batch is not None and comm.name is not Comm.single:
        raise UserError(
            f"trainer.global_batch={trainer.global_batch}: is for comm=single only; with comm={comm.name.value} set "
            f"trainer.batch_size, the rows of each node"
        )
    if trainer.batch_size < config.cluster.devices_per_node and comm.name is not Comm.single:
        raise UserError(
            f"trainer.batch_size={trainer.batch_size}: are the rows of a node; its "
            f"cluster.devices_per_node={config.cluster.devices_per_node} devices need one each"
        )
    rows = trainer.global_batch or trainer.batch_size
    if trainer.accumulate > rows:
        key = "trainer.global_batch" if trainer.global_batch else "trainer.batch_size"
        raise UserError(f"trainer.accumulate={trainer.accumulate}: must be at most {key}={rows}, which it cuts up")
    if comm.name.of_torch and comm.overlap is not Overlap.backward:
        raise UserError(
            f"comm.overlap={comm.overlap.value}: comm={comm.name.value} always overlaps, in its own way; leave it at "
            f"backward, or take comm=ps"
        )
    if (comm.name.of_torch or comm.name is Comm.downpour) and comm.staleness:
        raise UserError(
            f"comm.staleness={comm.staleness}: comm={comm.name.value} has none; leave it at 0, or take comm=hybrid"
        )
    if comm.name is Comm.downpour and comm.overlap is not Overlap.backward:
        raise UserError(
            f"comm.overlap={comm.overlap.value}: comm=downpour sends when the optimizer steps, under the next "
            "iterations, and waits for nobody; leave it at backward, or take comm=ps"
        )
    if comm.name is Comm.downpour and config.cluster.devices_per_node > 1:
        raise UserError(
            f"cluster.devices_per_node={config.cluster.devices_per_node}: comm=downpour has one worker per node; raise "
            f"cluster.nodes instead, or take comm=ps"
        )
    if comm.name is Comm.downpour and config.device is Device.cuda:
        raise UserError("device=cuda: comm=downpour trains on the CPU; take comm=ps, or leave device at cpu")
    if config.cluster.time_dilation not in (1, AUTO) and config.hardware is None:
        raise UserError(
            f"cluster.time_dilation={config.cluster.time_dilation}: real computing cannot be dilated; take an emulated "
            f"accelerator (hardware=...), or leave it at 1"
        )
    if config.device is not Device.cpu and config.cluster.name is ClusterKind.emulated:
        raise UserError(
            f"device={config.device.value}: with cluster=emulated all nodes are of this machine, and their GPUs would "
            f"go past its network; leave device at cpu"
        )


def _check_emulated(config: TrainConfig) -> None:
    """Refuses what needs numbers, where an emulated accelerator computes none."""
    trainer, weights = config.trainer, config.model.get("weights")
    for key, value, unused, why in (
        ("model.weights", weights, weights is None, "parameters have no values"),
        ("trainer.resume", trainer.resume, trainer.resume is None, "parameters have no values"),
        ("trainer.target_accuracy", trainer.target_accuracy, trainer.target_accuracy is None, "nothing is learnt"),
        ("trainer.clip_norm", trainer.clip_norm, trainer.clip_norm is None, "gradients have no values"),
        ("trainer.check_every", trainer.check_every, trainer.check_every == 0, "replicas have no values"),
        ("trainer.precision", trainer.precision, trainer.precision is Precision.fp32, "everything is fp32"),
        ("device", config.device, config.device is Device.cpu, "nothing is on a GPU"),
    ):
        if not unused:
            assert config.hardware is not None
            raise UserError(
                f"{key}={value}: {why} on an emulated accelerator (hardware={config.hardware.name}); leave it out, or "
                f"compute for real, without hardware (~hardware, if an experiment sets it)"
            )


def _check_dataset(dataset: Mapping[str, Any]) -> None:
    shape, classes = dataset.get("shape"), dataset.get("num_classes")
    if shape is not None and not (isinstance(shape, list) and shape and all(map(_is_count, shape))):
        raise UserError(f"dataset.shape={shape}: must be a list of positive whole numbers, such as [3,32,32]")
    if classes is not None and not _is_count(classes):
        raise UserError(f"dataset.num_classes={classes}: must be a positive whole number")


def _check_optimizer(optimizer: Mapping[str, Any]) -> None:
    for name in ("lr", "momentum", "weight_decay"):
        value = optimizer.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise UserError(f"optimizer.{name}={value}: must be a number, at least 0")


def _check_schedule(schedule: Mapping[str, Any]) -> None:
    interval = schedule.get("interval", "epoch")
    if interval not in _INTERVALS:
        raise UserError(f"schedule.interval={interval}: must be {' or '.join(_INTERVALS)}")
    for name in _LENGTHS:
        if name in schedule and schedule[name] is None:
            raise UserError(
                f"schedule.{name}: follows trainer.epochs, which is null; set it, in units of "
                f"schedule.interval={interval}"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _select(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
