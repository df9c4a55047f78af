"""Seconds per iteration on a cluster that nobody here owns, by simulation; starts nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
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

    if config.simulate.experiments is not None:
        for each in _experiments(config).values():
            _check(each)
        return
    check_train(config)
    check_simulate(config)
    try:
        models.check(config.model)
    except UserError as error:
        raise UserError(f"model: {error}") from error


def _simulate(config: SimulateConfig, overrides: list[str], folder: Path) -> Result:
    from poseidon.reporting.simulated import render, write
    from poseidon.training.simulate import make_simulation

    if config.simulate.experiments is not None:
        return _versus(config, overrides)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its fonts, and Hydra would show it
    simulation = make_simulation(config, overrides)
    print(render(simulation), end="")
    if len(simulation.cells) > 1:
        for path in write(simulation):
            print(f"simulated: {path}")
    return Result(0)


def _experiments(config: SimulateConfig) -> dict[str, SimulateConfig]:
    """The config of each."""
    from poseidon.config.compose import compose

    options = config.simulate
    if not options.experiments:
        raise UserError("simulate.experiments=[]: must be experiments, such as [p17_vgg19,p17_resnet152]")
    if options.comms is None or not any(comm.startswith("ddp") for comm in options.comms):
        raise UserError("simulate.experiments: compares with DDP; add to simulate.comms, say, ddp+1mib and ddp+25mib")
    configs = {}
    for experiment in dict.fromkeys(options.experiments):
        each = compose("simulate", [f"experiment={experiment}"])
        alone = replace(options, experiments=None)
        configs[experiment] = replace(each, simulate=alone, comm=config.comm)
    return configs


def _versus(config: SimulateConfig, overrides: list[str]) -> Result:
    from poseidon.reporting import versus
    from poseidon.training.simulate import make_simulation

    simulations = {name: make_simulation(each) for name, each in _experiments(config).items()}
    folder = config.simulate.folder
    where = Path(folder).expanduser() if folder else Path("reports", "simulated", "vs_ddp")
    files = versus.write(simulations, overrides, where)
    found = versus.duels(simulations)
    times, experiment, cell, _ = found[0]
    print(f"{len(found)} cells; the smallest ratio: {times:.4f}, {experiment}, {cell.link}, {cell.outcome.nodes} nodes")
    print("\n".join(versus.smallest(found)))
    for path in files:
        print(f"simulated: {path}")
    return Result(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
