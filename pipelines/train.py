"""Train a model on several worker nodes and keep the records of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from poseidon.config.app import Result, run
from poseidon.config.check import check_train
from poseidon.config.schema import TrainConfig
from poseidon.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon train`` and gives its exit code."""
    return run("train", argv, _train, _check, _tracked)


def _check(config: TrainConfig) -> None:
    from poseidon import data, models
    from poseidon.training.job import find_checkpoint

    check_train(config)
    for group, check, node in (("model", models.check, config.model), ("dataset", data.check, config.dataset)):
        try:
            check(node)
        except UserError as error:
            raise UserError(f"{group}: {error}") from error
    if config.trainer.resume is not None:
        find_checkpoint(config.trainer.resume)


def _tracked(configs: Sequence[TrainConfig], axes: Mapping[str, Sequence[str]] | None, body: Callable[[], int]) -> int:
    """Runs the jobs; those of one sweep share a time dilation that is left to them."""
    from poseidon.tracking.sweep import run_tracked
    from poseidon.training.dilation import pick

    picked = pick(configs) if axes is not None else None
    if picked is not None:
        print(picked, flush=True)
    return run_tracked(configs, axes, body, picked.factor if picked is not None else None)


def _train(config: TrainConfig, overrides: list[str], folder: Path) -> Result:
    from poseidon.training.job import run_job

    outcome = run_job(config, overrides, folder)
    return Result(outcome.exit_code, outcome.value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
