"""The papers' published speedups: ``reports/published.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.config.paths import reports_dir
from poseidon.errors import UserError

#: Trust level -> the word that stands beside the figure wherever it is shown.
WORDS = {"V": "published", "D": "published", "U": "unverified"}


@dataclass(frozen=True)
class Curve:
    """Published speedups of one system.

    Attributes:
        points: (nodes, speedup over one machine), by nodes.
        trust: V, D or U, see ``reports/published.yaml``.
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
        """The curves of an experiment that is the papers' own: same model, rows per node and classes."""
        return [
            curve
            for curve in self.curves
            if model in curve.models and (batch_size, classes) == (curve.batch_size, curve.classes)
        ]


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
        baseline = float(entry.pop("baseline_seconds"))
        entry["points"] = {n: n * baseline / float(seconds) for n, seconds in entry.pop("seconds").items()}
    points = tuple(sorted((int(n), float(speedup)) for n, speedup in entry.pop("points").items()))
    if entry["trust"] not in WORDS:
        raise ValueError(f"trust={entry['trust']}: must be one of {', '.join(WORDS)}")
    return Curve(points=points, models=tuple(entry.pop("models")), **entry)
