"""Show which layer would travel how between the nodes, and what that costs; starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from poseidon.config.app import Result, run
from poseidon.config.schema import PlanConfig
from poseidon.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon plan`` and gives its exit code."""
    return run("plan", argv, _plan, _check)


def _check(config: PlanConfig) -> None:
    from poseidon import models
    from poseidon.config.check import check_train

    check_train(config)
    try:
        models.check(config.model)
    except UserError as error:
        raise UserError(f"model: {error}") from error


def _plan(config: PlanConfig, overrides: list[str], folder: Path) -> Result:
    from poseidon.reporting.plan import render
    from poseidon.training.plan import make_plan

    text = render(make_plan(config), config.plan.format)
    if config.plan.output is None:
        print(text, end="")
    else:
        _write(Path(config.plan.output).expanduser(), text)
    return Result(0)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"plan.output: cannot write {path}: {error.strerror}") from error
    print(f"plan: {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
