"""The papers' published speedups and seconds per iteration: ``reports/published.yaml``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poseidon.config.paths import reports_dir
from poseidon.errors import UserError

#: Trust level -> the word that stands beside the figure wherever it is shown.
WORDS = {"V": "published", "D": "published", "U": "unverified"}

_GBE = re.compile(r"(\d+(?:\.\d+)?) GbE\b")


@dataclass(frozen=True)
class Curve:
    """Published speedups of one system.

    Attributes:
        points: (nodes, speedup over one machine), by nodes.
        trust: of what was published, V, D or U, see ``reports/published.yaml``; speedups that follow from seconds are
            derived, but no less to be relied upon.
        seconds: nodes -> seconds per iteration, if these were published.
        baseline_seconds: of one machine without the system.
        comm: choice of ``conf/comm`` that does the same here.
        profile: choice of ``conf/hardware`` that stands for its hardware.
        fitted: nodes whose seconds that profile's rates were fitted to, which so are no test of it.
        departs: why emulated seconds are not its seconds.
    """

    paper: str
    system: str
    models: tuple[str, ...]
    batch_size: int
    classes: int
    hardware: str
    link: str
    trust: str
    points: tuple[tuple[int, float], ...]
    seconds: Mapping[int, float] = field(default_factory=dict)
    baseline_seconds: float | None = None
    comm: str | None = None
    profile: str | None = None
    fitted: tuple[int, ...] = ()
    departs: str | None = None

    @property
    def bandwidth(self) -> float:
        """Bits/s of its links."""
        return float(_GBE.match(self.link)[1]) * 1e9  # type: ignore[index]

    @property
    def word(self) -> str:
        return WORDS[self.trust]

    @property
    def label(self) -> str:
        return f"{self.paper} {self.system}, {self.hardware}, {self.link}: {self.word}"


@dataclass(frozen=True)
class Published:
    """All curves, and the papers' full titles by their short names."""

    curves: tuple[Curve, ...]
    papers: Mapping[str, str]

    def of(self, model: str, batch_size: int, classes: int | None) -> list[Curve]:
        """The curves of an experiment that is the papers' own: same model, rows per node and classes. Where links are
        emulated, :func:`on_links` takes those of the same bandwidth from them."""
        return [
            curve
            for curve in self.curves
            if model in curve.models and (batch_size, classes) == (curve.batch_size, curve.classes)
        ]


def on_links(curves: Iterable[Curve], bandwidth: float | None) -> tuple[list[Curve], list[Curve]]:
    """(those measured on links of this bandwidth, the others).

    Args:
        bandwidth: bits/s; None: no link that could be theirs.
    """
    curves = list(curves)
    same = [c for c in curves if bandwidth is not None and math.isclose(c.bandwidth, bandwidth, rel_tol=1e-3)]
    return same, [curve for curve in curves if curve not in same]


def load(path: Path | None = None) -> Published:
    """Reads a file like ``reports/published.yaml``, which is the default. Raises UserError naming a bad entry."""
    from omegaconf import OmegaConf

    path = path or reports_dir() / "published.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    curves = []
    for number, entry in enumerate(content["curves"]):
        try:
            curves.append(_curve(dict(entry)))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: curve {number}: {type(error).__name__}: {error}") from error
    return Published(tuple(curves), dict(content.get("papers") or {}))


def _curve(entry: dict[str, Any]) -> Curve:
    if "seconds" in entry:
        entry["seconds"] = {int(n): float(seconds) for n, seconds in sorted(entry["seconds"].items())}
        entry["points"] = {n: n * float(entry["baseline_seconds"]) / s for n, s in entry["seconds"].items()}
    points = tuple(sorted((int(n), float(speedup)) for n, speedup in entry.pop("points").items()))
    if entry["trust"] not in WORDS:
        raise ValueError(f"trust={entry['trust']}: must be one of {', '.join(WORDS)}")
    if not _GBE.match(entry["link"]):
        raise ValueError(f"link={entry['link']}: must begin with a bandwidth, such as 40 GbE")
    fitted = tuple(entry.pop("fitted", ()))
    return Curve(points=points, models=tuple(entry.pop("models")), fitted=fitted, **entry)
