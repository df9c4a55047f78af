"""Suites of ``poseidon bench``: files of ``benchmarks/``, or anybody's own, which say what is compared with what.

A file's keys, and those of its cases and bars, are the fields of the classes below; others are errors.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from poseidon.bench.figures import FIGURES
from poseidon.config.paths import benchmarks_dir
from poseidon.config.schema import BenchOptions
from poseidon.errors import UserError

PAIRS, ITERATIONS, WARMUP = 5, 25, 5
#: Values of a case, of a suite and of the command line; the last that is no None holds.
_COUNTS = ("pairs", "iterations", "warmup")


@dataclass(frozen=True)
class Bar:
    """What is to be reached, or only shown.

    Attributes:
        variant: whose figure.
        over: the variant that it is compared with; of figures that have two.
        figure: of :data:`poseidon.bench.figures.FIGURES`.
        at_least, at_most: the bar; neither: nothing has to be reached.
        ideal: what arithmetic allows.
    """

    variant: str
    over: str | None = None
    figure: str = "speed"
    at_least: float | None = None
    at_most: float | None = None
    ideal: float | None = None


@dataclass(frozen=True)
class Case:
    """Variants of one training.

    Attributes:
        what: one line for people.
        overrides: of ``poseidon train``, for all variants.
        variants: the overrides of each. Where one lists several values of a key (``a=1,2``), all are run once, and the
            fastest then stands for the variant.
        pairs: times that every variant is run, in turn.
        iterations: of a run, those included that warm up.
        warmup: of these, not timed.
    """

    name: str
    what: str
    variants: Mapping[str, Sequence[str]]
    overrides: Sequence[str] = ()
    bars: Sequence[Bar] = ()
    pairs: int = PAIRS
    iterations: int = ITERATIONS
    warmup: int = WARMUP


@dataclass(frozen=True)
class Suite:
    """One file.

    Attributes:
        what: one line for people.
        cases: all of them.
        chosen: those that are to be run.
    """

    name: str
    what: str
    cases: Sequence[Case]
    chosen: Sequence[Case]


def load(options: BenchOptions) -> Suite:
    """The suite that the options name.

    Raises:
        UserError: there is no such suite or case, or its file is wrong; one line.
    """
    path = _find(options.suite)
    node = _read(path)
    own = {key: getattr(options, key) for key in _COUNTS}
    for key, value in own.items():
        if value is not None and value < 1:
            raise UserError(f"bench.{key}={value}: must be at least 1")
    suite = _suite(path.stem, node, str(path), {key: value for key, value in own.items() if value is not None})
    if options.cases is None:
        return suite
    known = {case.name: case for case in suite.cases}
    for name in options.cases:
        if name not in known:
            raise UserError(f"bench.cases: suite {suite.name} has no case {name!r}{_hint(name, known)}")
    if not options.cases:
        raise UserError(f"bench.cases=[]: name at least one of {', '.join(known)}, or leave it out")
    return replace(suite, chosen=[case for case in suite.cases if case.name in options.cases])


def names() -> list[str]:
    """Of the suites that are shipped."""
    return sorted(path.stem for path in benchmarks_dir().glob("*.yaml"))


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"bench.suite: there is no file {path}")
        return path
    if name not in names():
        raise UserError(
            f"bench.suite: there is no suite {name!r}{_hint(name, names())}; or the path of a file of yours"
        )
    return benchmarks_dir() / f"{name}.yaml"


def _read(path: Path) -> Any:
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # of YAML's and OmegaConf's making, or of the file system's
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _suite(name: str, node: Any, where: str, given: Mapping[str, Any]) -> Suite:
    node = _mapping(node, where, ("what", "overrides", "cases", *_COUNTS), required=("what", "cases"))
    cases = node["cases"]
    if not isinstance(cases, Mapping) or not cases:
        raise UserError(f"{where}: cases must map a name to each case")
    shared = {key: node[key] for key in _COUNTS if key in node}
    common = _overrides(node.get("overrides", []), f"{where}: overrides")
    found = [_case(str(n), case, f"{where}: {n}", common, shared, given) for n, case in cases.items()]
    return Suite(name, str(node["what"]), found, found)


def _case(
    name: str, node: Any, where: str, common: Sequence[str], shared: Mapping[str, Any], given: Mapping[str, Any]
) -> Case:
    allowed = tuple(f.name for f in fields(Case) if f.name != "name")
    node = _mapping(node, where, allowed, required=("what", "variants"))
    if not isinstance(node["variants"], Mapping) or not node["variants"]:
        raise UserError(f"{where}: variants must map a name to the overrides of each")
    variants = {str(n): _overrides(o, f"{where}: {n}") for n, o in node["variants"].items()}
    counts = {**shared, **{key: node[key] for key in _COUNTS if key in node}, **given}
    case = Case(
        name=name,
        what=str(node["what"]),
        variants=variants,
        overrides=[*common, *_overrides(node.get("overrides", []), f"{where}: overrides")],
        bars=[_bar(bar, f"{where}: bar {i}", variants) for i, bar in enumerate(node.get("bars", []), 1)],
        **counts,
    )
    _check_counts(case, where)
    return case


def _check_counts(case: Case, where: str) -> None:
    for key in _COUNTS:
        value = getattr(case, key)
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: {key}={value}: must be a number, at least 1")
    if case.iterations <= case.warmup:
        raise UserError(
            f"{where}: iterations={case.iterations}: must be more than the {case.warmup} that warm up (bench.warmup)"
        )


def _bar(node: Any, where: str, variants: Mapping[str, Any]) -> Bar:
    node = _mapping(node, where, tuple(f.name for f in fields(Bar)), required=("variant",))
    bar = Bar(**node)
    if bar.figure not in FIGURES:
        raise UserError(f"{where}: there is no figure {bar.figure!r}{_hint(bar.figure, FIGURES)}")
    relative = FIGURES[bar.figure].relative
    if relative != (bar.over is not None):
        must = "needs the variant that it is over" if relative else "is of one variant, over none"
        raise UserError(f"{where}: {bar.figure} {must} (over)")
    for key, name in (("variant", bar.variant), ("over", bar.over)):
        if name is not None and name not in variants:
            raise UserError(f"{where}: {key}: there is no variant {name!r}{_hint(str(name), variants)}")
    for key in ("at_least", "at_most", "ideal"):
        value = getattr(bar, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UserError(f"{where}: {key}={value}: must be a number")
    return bar


def _overrides(node: Any, where: str) -> list[str]:
    if not isinstance(node, list) or not all(isinstance(item, str) for item in node):
        raise UserError(f"{where}: must be a list of overrides of poseidon train, such as [comm=ps, cluster.nodes=4]")
    return node


_Keys = TypeVar("_Keys", bound=tuple[str, ...])


def _mapping(node: Any, where: str, allowed: _Keys, required: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(node, Mapping):
        raise UserError(f"{where}: must have keys ({', '.join(allowed)})")
    for key in node:
        if key not in allowed:
            raise UserError(f"{where}: unknown key {key!r}{_hint(str(key), allowed)}")
    for key in required:
        if node.get(key) is None:
            raise UserError(f"{where}: {key} is missing")
    return {str(key): value for key, value in node.items()}


def _hint(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"{f'; did you mean {near[0]}' if near else ''}; there is {', '.join(known)}"
