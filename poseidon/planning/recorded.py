"""A plan that was recorded, to go by again: of a run's plan.json, or of ``poseidon plan plan.format=json``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from poseidon.errors import UserError
from poseidon.planning.book import Param
from poseidon.planning.cost import Scheme
from poseidon.planning.topology import Topology

#: What a weight that is made of factors, or of rows, can go by; all else goes by PS.
_TAKES = {"linear": ("ps", "sfb", "adam", "block"), "rows": ("ps", "rows"), None: ("ps",)}


@dataclass(frozen=True)
class Recorded:
    """Schemes as a file tells them.

    Attributes:
        source: the file, which errors name.
        schemes: by parameter.
        shapes: of those that do not go by PS.
        nodes: devices of each node that the plan was made for.
    """

    source: str
    schemes: Mapping[str, Scheme]
    shapes: Mapping[str, tuple[int, ...]]
    nodes: tuple[int, ...]

    def check(self, names: Collection[str], params: Sequence[Param], topology: Topology) -> None:
        """Raises UserError, in one line, if it is no plan for this model on these nodes.

        Args:
            names: of all parameters, frozen ones included.
            params: those that are trained.
        """
        nodes = tuple(map(len, topology.nodes))
        if nodes != self.nodes:
            raise UserError(
                f"plan={self.source} was made for {_nodes(self.nodes)}, and there are {_nodes(nodes)} here: make one "
                "for these (`poseidon plan plan.format=json`)"
            )
        missing = next((param.name for param in params if param.name not in self.schemes), None)
        if missing is not None:
            raise UserError(f"plan={self.source} is of another model: it has no {missing}")
        unknown = next((name for name in self.schemes if name not in names), None)
        if unknown is not None:
            raise UserError(f"plan={self.source} is of another model: this one has no {unknown}")
        for param in params:
            scheme, shape = self.schemes[param.name], self.shapes.get(param.name, param.shape)
            if shape != param.shape:
                raise UserError(
                    f"plan={self.source} is of another model: {param.name} is {_by(shape)} there, "
                    f"{_by(param.shape)} here"
                )
            takes = ("rows",) if param.counted else _TAKES[param.factors]
            if scheme not in takes:
                raise UserError(
                    f"plan={self.source}: {param.name} ({param.layer_type}) cannot go by {scheme}; it can by "
                    f"{' or '.join(takes)}"
                )

    def left_out(self, name: str) -> UserError:
        """Of a weight that in the first iteration was not what its scheme needs."""
        return UserError(
            f"plan={self.source}: {name} cannot go by {self.schemes[name]}: in the first iteration its gradient was "
            "not on every rank a product of factors alone; it can by ps"
        )


def read_plan(path: str) -> Recorded:
    """Raises UserError, in one line, if that is no file of a plan of ours."""
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"plan={path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"plan={path}: is not JSON: {error}") from error
    return recorded_plan(content, path)


def recorded_plan(content: Any, source: str) -> Recorded:
    """From what a file holds.

    Args:
        content: a list of rows, one per parameter, as a run's plan.json; or a dict of layers, as `poseidon plan` has.

    Raises:
        UserError: it is neither, or of PyTorch's own.
    """
    schemes: dict[str, Scheme] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        if isinstance(content, list):
            rows = [((row["param"],), row) for row in content]
            nodes = content[0]["nodes"]
        else:
            rows = [(row["params"], row) for row in content["layers"]]
            nodes = [content["devices_per_node"]] * content["nodes"]
        for names, row in rows:
            schemes |= dict.fromkeys(names, row["scheme"])
            if row["scheme"] != "ps":
                shapes |= dict.fromkeys(names, tuple(row["shape"]))
        found = Recorded(source, schemes, shapes, tuple(nodes))
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"plan={source}: is neither a run's plan.json nor what `poseidon plan plan.format=json` writes"
        ) from error
    odd = next((scheme for scheme in schemes.values() if scheme not in get_args(Scheme)), None)
    if odd is not None:
        raise UserError(f"plan={source}: {odd} is no scheme of ours, which are {', '.join(get_args(Scheme))}")
    return found


def _nodes(devices: Sequence[int]) -> str:
    return f"{len(devices)} nodes of {' and '.join(map(str, sorted(set(devices))))} device{'s' * (max(devices) > 1)}"


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
