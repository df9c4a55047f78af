"""Seconds per iteration on a cluster that nobody here owns, by simulation; starts nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from poseidon.config.app import Result, run
from poseidon.config.schema import SimulateConfig
from poseidon.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon simulate`` and gives its exit code."""
    return run("simulate", argv, _simulate, _check)


def _check(config: SimulateConfig) -> None:
    from poseidon import models
    from poseidon.config.check import check_train
    from poseidon.config.simulated import check_simulate

    check_train(config)
    check_simulate(config)
    try:
        models.check(config.model)
    except UserError as error:
        raise UserError(f"model: {error}") from error


def _simulate(config: SimulateConfig, overrides: list[str], folder: Path) -> Result:
    from poseidon.reporting.simulated import render, write
    from poseidon.training.simulate import make_simulation

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its fonts, and Hydra would show it
    simulation = make_simulation(config, overrides)
    print(render(simulation), end="")
    if len(simulation.cells) > 1:
        for path in write(simulation):
            print(f"simulated: {path}")
    return Result(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
