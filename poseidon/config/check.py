"""What a schema cannot say: ranges, keys that contradict each other, targets that do not exist."""

from __future__ import annotations

import math
from typing import Any

from poseidon.config.schema import OPEN_GROUPS, Comm, Overlap, TrainConfig
from poseidon.config.targets import check_target
from poseidon.errors import UserError

#: Smallest values; null passes where the type allows it.
_AT_LEAST = {
    "cluster.nodes": 1,
    "cluster.threads": 1,
    "comm.kv_bytes": 4,  # one float
    "comm.merge_bytes": 0,
    "trainer.batch_size": 1,
    "trainer.global_batch": 1,
    "trainer.iterations": 1,
    "trainer.accumulate": 1,
    "trainer.workers": 0,
    "trainer.eval_every": 0,
    "trainer.eval_batch_size": 1,
    "trainer.checkpoint_every": 0,
    "trainer.log_every": 1,
}
_POSITIVE = ("comm.timeout", "comm.ddp.bucket_cap_mb", "trainer.epochs", "trainer.clip_norm", "trainer.target_accuracy")
_INTERVALS = ("epoch", "iteration")


def check_train(config: TrainConfig) -> None:
    """Raises UserError in one line if the config cannot run; imports no torch and none of the targets."""
    _check_ranges(config)
    _check_contradictions(config)
    for group in OPEN_GROUPS:
        node = getattr(config, group)
        if group == "schedule" and node.get("_target_") is None:
            continue  # constant
        check_target(group, node)
    interval = config.schedule.get("interval", "epoch")
    if interval not in _INTERVALS:
        raise UserError(f"schedule.interval={interval}: must be {' or '.join(_INTERVALS)}")


def _check_ranges(config: TrainConfig) -> None:
    for key, least in _AT_LEAST.items():
        value = _select(config, key)
        if value is not None and value < least:
            raise UserError(f"{key}={value}: must be at least {least}")
    for key in _POSITIVE:
        value = _select(config, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{key}={value}: must be greater than 0")
    target = config.trainer.target_accuracy
    if target is not None and target > 1:
        raise UserError(
            f"trainer.target_accuracy={target}: is a fraction, at most 1; for {target} % write {target / 100}"
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
    rows = trainer.global_batch or trainer.batch_size
    if trainer.accumulate > rows:
        key = "trainer.global_batch" if trainer.global_batch else "trainer.batch_size"
        raise UserError(f"trainer.accumulate={trainer.accumulate}: must be at most {key}={rows}, which it cuts up")
    if comm.name is Comm.ddp and comm.overlap is Overlap.none:
        raise UserError("comm.overlap=none: comm=ddp always overlaps; leave it at backward, or take comm=ps")


def _select(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
