"""How a workflow becomes a Hydra app: one call for ``pipelines/<workflow>.py``, with errors in one line.

The whole command line is composed and checked before Hydra's own main runs (every job of a sweep too), so a
mistake starts nothing and makes no folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from poseidon.config.explain import explain
from poseidon.config.paths import conf_dir
from poseidon.errors import PoseidonError, UserError

#: Exit codes of a job that a signal ended: the rest of a sweep is not wanted either.
_SIGNALLED = (130, 143, 129)


@dataclass(frozen=True)
class Result:
    """How a job ended: its exit code, and what a sweep maximises."""

    exit_code: int
    value: float | None = None


#: ``task(config, overrides, folder)``: the typed config, this job's overrides, and the folder that Hydra
#: chose for it (which exists, and may be another run's).
Task = Callable[[Any, list[str], Path], Result]

#: ``around(configs, axes, body)`` runs the jobs by ``body()``, which gives the exit code. ``configs``: of the jobs,
#: as far as they are known beforehand; ``axes``: swept keys with their values, None if this is no sweep.
Around = Callable[[Sequence[Any], Mapping[str, Sequence[str]] | None, Callable[[], int]], int]


def run(
    workflow: str, argv: Sequence[str], task: Task, check: Callable[[Any], None], around: Around | None = None
) -> int:
    """Runs a workflow on a command line and gives the exit code.

    Args:
        workflow: names the root config, ``conf/<workflow>.yaml``.
        argv: Hydra's overrides and flags.
        check: raises UserError for a typed config that cannot run.
        around: called once for all jobs together, before Hydra makes a folder; not if nothing is to run.

    A :class:`UserError` is one line on stderr and exit code 2. A failed job of a sweep does not stop the
    sweep, an interrupted one does.
    """
    from poseidon.config.compose import CommandLine, validate
    from poseidon.config.store import register

    register()
    configs: list[Any] = []

    def accept(config: Any) -> None:
        check(config)
        configs.append(config)

    try:
        line = CommandLine.parse(workflow, argv)
        validate(line, accept)
        body = partial(_main, workflow, argv, task, sweep=line.multirun)
        if around is None or not (line.runs and line.checks):
            return body()
        return around(configs, line.axes() if line.multirun else None, body)
    except UserError as error:
        return _say(f"poseidon {workflow}: {error}", 2)
    except PoseidonError as error:
        return _say(f"poseidon {workflow}: {error}", 1)


def _main(workflow: str, argv: Sequence[str], task: Task, *, sweep: bool) -> int:
    """Hydra's main, without its way to report errors."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    failed: list[str] = []
    begun = False

    def job(cfg: Any) -> float | None:
        nonlocal begun
        begun = True
        overrides = list(HydraConfig.get().overrides.task)
        try:
            result = task(OmegaConf.to_object(cfg), overrides, Path(HydraConfig.get().runtime.output_dir))
        except UserError as error:
            if sweep:
                raise
            raise SystemExit(_say(f"poseidon {workflow}: {error}", 2)) from error  # Hydra would add a line
        if result.exit_code == 0:
            return result.value
        if not sweep or result.exit_code in _SIGNALLED:
            raise SystemExit(result.exit_code)
        failed.append(" ".join(overrides))
        raise PoseidonError(f"a job of the sweep failed: {failed[0]}")

    main = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=workflow)(job)
    with _environment(workflow, argv):
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(explain(error)) from error
        except OSError as error:
            if begun:
                raise
            key = "hydra.sweep.dir" if sweep else "hydra.run.dir"
            raise UserError(f"{key}: cannot make {error.filename}: {error.strerror}") from error
    return 0


@contextmanager
def _environment(workflow: str, argv: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` as Hydra reads it, and its exceptions raised instead of printed and turned into exit 1."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["poseidon", *argv]  # the program's name stands in the TAB completion that Hydra installs
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _say(message: str, code: int) -> int:
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    return code
