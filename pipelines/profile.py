"""Measure what this machine takes for a model's layers: a profile that hardware=NAME emulates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from poseidon.config.app import Result, run
from poseidon.config.schema import ProfileConfig


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon profile`` and gives its exit code."""
    # The profile is yet to be made: its name is no choice of the group.
    named = [f"hardware.name={a.removeprefix('hardware=')}" if a.startswith("hardware=") else a for a in argv]
    return run("profile", named, _profile, _check)


def _check(config: ProfileConfig) -> None:
    from poseidon import models
    from poseidon.config.check import check_train
    from poseidon.errors import UserError
    from poseidon.training.profile import check

    check_train(config)
    check(config)
    try:
        models.check(config.model)
    except UserError as error:
        raise UserError(f"model: {error}") from error


def _profile(config: ProfileConfig, overrides: list[str], folder: Path) -> Result:
    from poseidon.reporting.profile import render
    from poseidon.training.profile import measure, save

    measured = measure(config)
    path = save(measured, config)
    print(render(measured.profile, measured.model, measured.seconds, measured.flops, path), end="")
    return Result(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
