"""Sorts runs into sections (one per setting), in these into configurations (repeats), and finds the baselines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from poseidon.reporting.dilation import chosen
from poseidon.reporting.emulated import hardware, link, straggler
from poseidon.reporting.runs import COMPLETED, Run, Stat, stat
from poseidon.reporting.variants import (
    curve_order,
    differing_keys,
    label,
    natural,
    setting_params,
    short,
    telling_keys,
    usual,
)


@dataclass(frozen=True)
class Baseline:
    """One machine's speed.

    Attributes:
        differs: config keys in which its runs are not those of the configuration (none matches fully).
    """

    speed: Stat
    differs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Configuration:
    """Runs that differ in nothing but the seed.

    Attributes:
        variant: names its curve.
        rows: of all nodes, per iteration.
        dilation: f of all its runs.
    """

    variant: str
    comm: str
    nodes: int
    rows: int
    runs: tuple[Run, ...]
    dilation: float = 1.0

    @cached_property
    def speed(self) -> Stat | None:
        return stat(run.speed for run in self.runs)

    @property
    def oversubscribed(self) -> bool:
        return any(run.oversubscribed for run in self.runs)

    @cached_property
    def seconds(self) -> Stat | None:
        """Per iteration, undilated."""
        return stat(run.iteration_seconds for run in self.runs)

    @property
    def bounds(self) -> tuple[str, ...]:
        """What of this machine's was the limit of any of its runs: ``CPU``, ``engine``."""
        return tuple(dict.fromkeys(bound for run in self.runs for bound in run.bounds))


@dataclass(frozen=True)
class Section:
    """Runs that may be compared: same model, data set, rows per node, numerics, threads, degree and type of host, and
    where they are emulated, same hardware, links, slow nodes and time dilation.

    Attributes:
        facts: what they have in common, in words.
        keys: config keys in which they differ nevertheless, beside comm, nodes and seed.
        dilation: f of all configurations.
        elsewhere: configurations at another f, which are in no curve.
    """

    title: str
    slug: str
    batch_size: int
    facts: dict[str, str]
    keys: tuple[str, ...]
    configurations: tuple[Configuration, ...]
    dilation: float = 1.0
    elsewhere: tuple[Configuration, ...] = ()

    @property
    def emulated(self) -> bool:
        return self.first.emulated

    @property
    def sleeps(self) -> bool:
        """Whether its accelerators are emulated."""
        return self.first.sleeps

    @property
    def links(self) -> Run | None:
        """A run that tells of its links: comm=single, which has none, is with those of any."""
        return next((run for run in self.runs if run.comm != "single"), None)

    @property
    def runs(self) -> list[Run]:
        return [run for configuration in self.configurations for run in configuration.runs]

    @property
    def first(self) -> Run:
        return self.configurations[0].runs[0]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(configuration.variant for configuration in self.configurations))

    @property
    def metric(self) -> str:
        """What evaluations measure."""
        return self.first.params.get("metric.name", "accuracy")

    @property
    def throughput_only(self) -> bool:
        return all(run.throughput_only for run in self.runs)

    @property
    def singles(self) -> list[Run]:
        """Runs of one machine with the rows of one node."""
        return [run for run in self.runs if run.comm == "single" and run.whole("batch_size") == self.batch_size]

    def baseline(self, configuration: Configuration) -> Baseline | None:
        """One machine's speed for this configuration; None if no run tells it."""
        keys = [key for key in self.keys if not key.startswith("comm.")]
        wanted = configuration.runs[0].params
        timed = [run for run in self.singles if run.speed is not None]
        same = [run for run in timed if all(run.params.get(key) == wanted.get(key) for key in keys)]
        speed = stat(run.speed for run in same or timed)
        if speed is None:
            return None
        differs = [key for key in keys if any(run.params.get(key) != wanted.get(key) for run in same or timed)]
        return Baseline(speed, tuple(differs))

    def speedup(self, configuration: Configuration) -> Stat | None:
        """Images/s over the baseline's median; None without either, or for rows other than the setting's."""
        baseline, speed = self.baseline(configuration), configuration.speed
        if baseline is None or speed is None or configuration.rows != configuration.nodes * self.batch_size:
            return None
        one = baseline.speed.median
        return Stat(speed.median / one, speed.low / one, speed.high / one, speed.count)


def sections(runs: Iterable[Run]) -> list[Section]:
    """Of the completed runs, sorted by title."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted((run for run in runs if run.status == COMPLETED), key=_run_order):
        groups.setdefault(_comparable(run), []).append(run)
    parts = [part for group in groups.values() for linked in _by_cluster(group) for part in _by_batch(linked)]
    firsts = [part[1][0] for part in parts]
    titles = [_title(members, batch_size) for batch_size, members in parts]
    made = []
    for (batch_size, members), title in zip(parts, titles, strict=True):
        alike = [first for first, other in zip(firsts, titles, strict=True) if other == title]
        extra = _distinction(members[0], alike)
        made.append(_section(batch_size, members, title + "".join(f", {fact}" for fact in extra)))
    return _unique(sorted(made, key=lambda section: (section.title, _comparable(section.first))))


def _section(batch_size: int, runs: list[Run], title: str) -> Section:
    keys = differing_keys(runs)
    telling = telling_keys(runs, keys)
    common = usual(runs, telling)
    cells: dict[tuple[tuple[int, str, bool], str, int, int, float], list[Run]] = {}
    for run in runs:
        rows = run.whole("batch_size")
        variant = label(run, telling, common, rows=None if rows == batch_size else rows)
        cells.setdefault((curve_order(run), variant, run.nodes, run.nodes * rows, run.dilation), []).append(run)
    configurations = [
        Configuration(variant, order[1], nodes, rows, tuple(members), dilation)
        for (order, variant, nodes, rows, dilation), members in sorted(
            cells.items(), key=lambda cell: (cell[0][0], natural(cell[0][1]), *cell[0][2:])
        )
    ]
    dilation = chosen((c.comm, c.dilation) for c in configurations)
    slug = re.sub(r"[^a-z0-9_.]+", "-", title.lower().replace(" rows per node", "")).strip("-.")
    facts = _facts(runs[0]) | _emulation(runs, dilation)
    if common:
        facts["unless said otherwise"] = ", ".join(short(key, value) for key, value in common.items())
    here = tuple(c for c in configurations if c.dilation == dilation)
    elsewhere = tuple(c for c in configurations if c.dilation != dilation)
    return Section(title, slug, batch_size, facts, tuple(keys), here, dilation, elsewhere)


def _by_cluster(runs: list[Run]) -> list[list[Run]]:
    """A part per kind of links and of slow nodes. One process has none, and is the baseline of all."""
    several = [run for run in runs if run.comm != "single"]
    kinds = sorted({_kind(run) for run in several})
    return [[run for run in runs if run.comm == "single" or _kind(run) == kind] for kind in kinds] or [runs]


def _kind(run: Run) -> tuple[str, str]:
    return link(run), straggler(run)


def _emulation(runs: Sequence[Run], dilation: float) -> dict[str, str]:
    """What else emulated runs have in common."""
    return {**_cluster(runs), "time dilation": f"f = {dilation:g}"} if runs[0].emulated else {}


def _cluster(runs: Sequence[Run]) -> dict[str, str]:
    """The links of emulated runs of several nodes, and who is slow; {} if there are none."""
    several = next((run for run in runs if run.comm != "single"), None)
    if several is None or not several.emulated:
        return {}
    words, slow = _kind(several)
    return {"link": words or "not emulated", **({"slow node": slow} if slow else {})}


def _by_batch(runs: list[Run]) -> list[tuple[int, list[Run]]]:
    """A part per rows of a node. comm=single with the rows of *all* nodes belongs to the runs that it equals."""
    rows = {run.whole("batch_size") for run in runs if run.comm != "single"}
    totals = {run.nodes * run.whole("batch_size"): run.whole("batch_size") for run in runs if run.comm != "single"}
    parts: dict[int, list[Run]] = {}
    for run in runs:
        own = run.whole("batch_size")
        parts.setdefault(own if own in rows else totals.get(own, own), []).append(run)
    return sorted(parts.items())


def _comparable(run: Run) -> tuple[str, ...]:
    """Of the run itself; see also :func:`_by_cluster`."""
    facts = (*_facts(run).values(), *(f"{key}={value}" for key, value in setting_params(run).items()))
    return tuple(facts)


def _facts(run: Run) -> dict[str, str]:
    return {
        "model": run.text("model"),
        "dataset": run.text("dataset"),
        "precision": run.text("precision"),
        "threads per rank": run.text("threads"),
        "devices per node": run.text("devices_per_node"),
        "degree": run.text("degree"),
        "host type": run.host_type,
        **({"hardware": hardware(run)} if run.emulated else {}),
    }


def _title(runs: Sequence[Run], batch_size: int) -> str:
    run, cluster = runs[0], _cluster(runs)
    words = [f"{run.text('model')} on {run.text('dataset')}, {batch_size} rows per node"]
    words += [hardware(run)] if run.sleeps else []
    words += ["links not emulated" if fact == "not emulated" else fact for fact in cluster.values()]
    return ", ".join(words)


def _distinction(run: Run, alike: Sequence[Run]) -> list[str]:
    """What tells a section from those that would have the same title."""
    facts = [
        value if name in ("degree", "host type", "precision") else f"{name}={value}"
        for name, value in _facts(run).items()
        if any(_facts(other).get(name) != value for other in alike)
    ]
    keys = [
        short(key, value)
        for key, value in setting_params(run).items()
        if any(setting_params(other).get(key) != value for other in alike)
    ]
    return list(dict.fromkeys([*facts, *keys]))


def _unique(found: list[Section]) -> list[Section]:
    """File names must differ even where titles differ in signs only, and on disks that know no upper case."""
    taken: dict[str, int] = {}
    unique = []
    for section in found:
        number = taken[section.slug] = taken.get(section.slug, 0) + 1
        slug = section.slug if number == 1 else f"{section.slug}-{number}"
        unique.append(replace(section, slug=slug))
    return unique


def _run_order(run: Run) -> tuple[int, str, float, str]:
    return (run.whole("seed"), run.text("started", ""), run.value("images_per_second") or 0.0, run.run_id)
