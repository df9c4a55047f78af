"""Composes a command line without running it, so that what is wrong is said before anything starts."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from poseidon.config.explain import explain, explain_missing
from poseidon.config.paths import conf_dir
from poseidon.errors import UserError

#: A sweep of more jobs is not composed job by job; each value of each axis is, once.
MANY = 64


@dataclass(frozen=True)
class CommandLine:
    """What Hydra is asked to do.

    Attributes:
        config_name: the root config.
        overrides: as given.
        folder: of more config groups (``--config-dir``), absolute.
        multirun: whether ``-m`` is there.
        runs: False if it only shows something (``--help``, ``--cfg`` ...): missing values are fine then.
        checks: False for flags that do not look at the overrides at all.
    """

    config_name: str
    overrides: list[str]
    folder: Path | None = None
    multirun: bool = False
    runs: bool = True
    checks: bool = True

    @classmethod
    def parse(cls, config_name: str, argv: Sequence[str]) -> CommandLine:
        """Reads Hydra's flags. Raises UserError for others."""
        parser = _Parser(add_help=False, allow_abbrev=False)
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--config-dir", "-cd")
        parser.add_argument("--config-name", "-cn", default=config_name)
        parser.add_argument("--config-path", "-cp")
        parser.add_argument("--multirun", "-m", action="store_true")
        parser.add_argument("--run", "-r", action="store_true")
        parser.add_argument("--package", "-p")
        for flags in (("--help", "-h"), ("--resolve",)):
            parser.add_argument(*flags, action="store_true")
        parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        parser.add_argument("--info", "-i", nargs="?", const="all")
        for flags in (("--hydra-help",), ("--version",), ("--shell-completion", "-sc")):
            parser.add_argument(*flags, action="store_true")
        parser.add_argument("--experimental-rerun")
        given = parser.parse_intermixed_args(list(argv))
        if given.config_path or given.experimental_rerun:
            raise UserError("--config-path and --experimental-rerun are not supported; use --config-dir DIR")
        folder = Path(given.config_dir).absolute() if given.config_dir else None
        if folder is not None and not folder.is_dir():
            raise UserError(f"--config-dir: there is no folder {folder}")
        shows = bool(given.help or given.cfg or given.info)
        blind = given.hydra_help or given.version or given.shell_completion
        return cls(given.config_name, given.overrides, folder, given.multirun, not shows, not blind)


def validate(line: CommandLine, check: Callable[[Any], None]) -> None:
    """Composes every job of the command line and checks its typed config.

    Raises:
        UserError: one line that names the key and what it accepts.
    """
    if not line.checks:
        return
    for overrides in _jobs(line):
        config = compose(line.config_name, overrides, line.folder, missing=not line.runs)
        if line.runs:
            check(config)


def compose(
    config_name: str, overrides: Sequence[str] = (), folder: Path | None = None, *, missing: bool = False
) -> Any:
    """The typed, resolved config of one job (None if ``missing`` values are allowed and there are some).

    Raises:
        UserError: one line that names the key and what it accepts.
    """
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from poseidon.config.store import register

    register()
    with _hydra(folder):
        try:
            cfg = hydra_compose(config_name, overrides=list(overrides))
            absent = sorted(OmegaConf.missing_keys(cfg))
            if absent and missing:
                return None
            if absent:
                raise UserError(explain_missing(absent, cfg))
            return OmegaConf.to_object(cfg)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(explain(error)) from error


def _jobs(line: CommandLine) -> Iterator[list[str]]:
    """The overrides of each job; of a large sweep only so many that each value of each axis occurs."""
    if not line.multirun:
        yield line.overrides
        return
    axes = [_values(override) for override in _parsed(line.overrides)]
    product = itertools.product(*axes)
    first = list(itertools.islice(product, MANY + 1))
    if len(first) <= MANY:
        yield from ([value for value in job if value is not None] for job in first)
        return
    for i in range(max(map(len, axes))):
        job = [axis[min(i, len(axis) - 1)] for axis in axes]
        yield [value for value in job if value is not None]


def _parsed(overrides: Sequence[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        return list(OverridesParser.create().parse_overrides(list(overrides)))
    except OverrideParseException as error:
        raise UserError(explain(error)) from error


def _values(override: Any) -> Sequence[str | None]:
    """The plain overrides of one axis; [None] if they are only known to the sweeper (intervals, globs)."""
    if not override.is_sweep_override():
        return [override.input_line]
    if not override.is_discrete_sweep() or override.value_type.name == "GLOB_CHOICE_SWEEP":
        return [None]
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


class _hydra:
    """Hydra's compose API on our configs and those of ``folder``, whatever was initialised before."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()
        self._context = initialize_config_dir(str(conf_dir()), version_base="1.3")
        self._context.__enter__()
        if self._folder is not None:
            state = GlobalHydra.instance()
            state.config_loader().get_search_path().append("command-line", f"file://{self._folder}")

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)
