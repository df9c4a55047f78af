"""Composes a command line without running it, so that what is wrong is said before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from poseidon.config.explain import explain, unknown_key
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

    def axes(self) -> dict[str, list[str]]:
        """The swept keys and their values; the expression itself where only the sweeper knows these."""
        swept = [override for override in _parsed(self.overrides) if override.is_sweep_override()]
        found: dict[str, list[str]] = {}
        for override in swept:
            key = override.get_key_element()
            values = [value.partition("=")[2] for value in _values(override) if value is not None]
            found[key] = values or [override.input_line.partition("=")[2]]
        return found


def validate(line: CommandLine, check: Callable[[Any], None]) -> None:
    """Composes every job of the command line and checks its typed config.

    Raises:
        UserError: one line that names the key and what it accepts.
    """
    if not line.checks:
        return
    for overrides in jobs(line):
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
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    from poseidon.config.store import register

    register()
    yaml: Any = import_module("yaml")  # has no types
    with _hydra():
        given = [*_searchpath(overrides, folder), *overrides]
        try:
            cfg = hydra_compose(config_name, overrides=given, return_hydra_config=True)
            choices = dict(cfg.hydra.runtime.choices)
            with open_dict(cfg):
                del cfg["hydra"]
            absent = _missing(OmegaConf.to_container(cfg))
            if absent and missing:
                return None
            if absent:
                raise UserError(_describe_missing(absent[0], choices, folder))
            config = OmegaConf.to_object(cfg)
            _refuse_unknown(config)
            _refuse_several(config, overrides)
            return config
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            line = explain(error, overrides, lambda key: _names(config_name, given, key))
            raise UserError(line) from error
        except AssertionError as error:  # OmegaConf's, of a key in a group that is null
            said = _inside_nothing(config_name, given, overrides)
            if said is None:
                raise
            raise UserError(said) from error


def _refuse_unknown(config: Any, prefix: str = "") -> None:
    """``+group.key=value`` goes past the schema: closed groups take no other keys all the same."""
    known = [field.name for field in dataclasses.fields(config)]
    for name, value in vars(config).items():
        if name not in known:
            raise UserError(unknown_key(f"{prefix}{name}", known))
        if dataclasses.is_dataclass(value):
            _refuse_unknown(value, f"{prefix}{name}.")


def _refuse_several(config: Any, overrides: Sequence[str]) -> None:
    """Hydra merges the choices of ``comm=[ps,sfb]`` into one; nobody means that."""
    groups = [field.name for field in dataclasses.fields(config)]
    for override in _parsed(overrides):
        if override.key_or_group in groups and isinstance(override.value(), list):
            raise UserError(f"{override.input_line}: takes one choice; a sweep is -m {override.key_or_group}=a,b")


def _missing(value: Any, key: str = "") -> list[str]:
    """Keys that are ``???``, interpolations not followed."""
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in _missing(item, f"{key}.{name}" if key else name)]
    return [key] if value == "???" else []


def _describe_missing(key: str, choices: Mapping[str, Any], folder: Path | None) -> str:
    """Names the key, and quotes the first comment of the file that wants it."""
    group = key.partition(".")[0]
    choice = choices.get(group)
    line = f"{key} has no value: give one, {key}=..."
    for root in (folder, conf_dir()):
        file = root / group / f"{choice}.yaml" if root and choice else None
        if file and file.is_file():
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            about = f" ({first.lstrip('# ')})" if first.startswith("#") else ""
            return f"{line}; {group}={choice} needs it{about}"
    return line


def _names(config_name: str, overrides: Sequence[str], key: str) -> list[str]:
    """Keys of a group, of the config as it would be without the overrides of single keys."""
    from omegaconf import DictConfig, OmegaConf

    cfg = _without_single_keys(config_name, overrides, hydra=key.partition(".")[0] == "hydra")
    if cfg is None:
        return []
    node = OmegaConf.select(cfg, key) if key else cfg
    if node is None and "." not in key:  # a group that is null has a schema all the same
        kinds = typing.get_args(typing.get_type_hints(OmegaConf.get_type(cfg)).get(key))
        return [field.name for kind in kinds if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)]
    return [str(name) for name in node if not str(name).startswith("_")] if isinstance(node, DictConfig) else []


def _inside_nothing(config_name: str, given: Sequence[str], overrides: Sequence[str]) -> str | None:
    """The line for an override like ``hardware.flops=1`` while ``hardware`` is null."""
    cfg = _without_single_keys(config_name, given, hydra=False)
    for override in overrides if cfg is not None else ():
        group, _, _ = override.lstrip("+~").partition("=")[0].partition(".")
        if group in cfg and cfg[group] is None:
            return f"{override}: {group} is null, and has no keys; choose one, {group}=..."
    return None


def _without_single_keys(config_name: str, overrides: Sequence[str], *, hydra: bool) -> Any:
    """The config as the overrides that choose of groups make it, or else none of them; None if that fails too."""
    from hydra import compose as hydra_compose

    def chooses(override: str) -> bool:
        name, equals, _ = override.partition("=")
        return bool(equals) and (name == "hydra.searchpath" or ("." not in name and not name.startswith(("+", "~"))))

    for kept in ([o for o in overrides if chooses(o)], []):
        try:
            return hydra_compose(config_name, overrides=kept, return_hydra_config=hydra)
        except Exception:  # only to say more about an error that is there already
            continue
    return None


def jobs(line: CommandLine) -> Iterator[list[str]]:
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
        raise UserError(explain(error, overrides)) from error


def _values(override: Any) -> Sequence[str | None]:
    """The plain overrides of one axis; [None] if they are only known to the sweeper (intervals, globs)."""
    if not override.is_sweep_override():
        return [override.input_line]
    if not override.is_discrete_sweep() or override.value_type.name == "GLOB_CHOICE_SWEEP":
        return [None]
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _searchpath(overrides: Sequence[str], folder: Path | None) -> list[str]:
    """``--config-dir`` as the override that the compose API knows, together with the user's own."""
    if folder is None:
        return []
    own = [o.value() for o in _parsed(overrides) if o.key_or_group == "hydra.searchpath"]
    paths = [f"file://{folder}", *(own[-1] if own and isinstance(own[-1], list) else [])]
    quoted = ",".join("'" + str(path).replace("'", r"\'") + "'" for path in paths)
    return [f"hydra.searchpath=[{quoted}]"]


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra's compose API on our configs, whatever was initialised before."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)
