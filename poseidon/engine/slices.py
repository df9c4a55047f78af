"""Server side of comm=downpour: slices of the parameters, and the optimizer that steps them.

A server keeps its own copy of the slices that the plan gives it, and an optimizer of the user's class over them, whose
parameters are the slices. That is the whole optimizer exactly if it works element by element, apart from what a
parameter has once (its count of steps ...), which all slices of it have alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from poseidon.errors import UserError
from poseidon.planning import Book, KVPair, Unit
from poseidon.schemes import in_order
from poseidon.transport import Header

#: torch.optim's optimizers that work element by element.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
#: Of their state what a parameter has once, not per element.
_ONCE = ("step", "mu_product", "eta", "mu")
#: Settings that say how a step is computed, not what.
_HOW = ("foreach", "fused", "capturable", "differentiable")

#: By optimizer and group, a group's settings as JSON.
Settings = list[list[dict[str, Any]]]


class Segment(NamedTuple):
    """Of a parameter what lies in one KV pair, in elements: its place in the parameter, in the pair, and its length."""

    param: int
    offset: int
    start: int
    length: int


class Place(NamedTuple):
    """Which optimizer steps a parameter, and in which of its groups."""

    optimizer: int
    group: int


def segments(book: Book, unit: Unit, pair: KVPair) -> list[Segment]:
    """The parameters in a pair, in order; a merged unit's flags, which are not used here, are none of them."""
    found, first = [], 0
    for index in unit.params:
        begin, end = max(first, pair.offset), min(first + book.params[index].numel, pair.offset + pair.length)
        if begin < end:
            found.append(Segment(index, begin - first, begin - pair.offset, end - begin))
        first += book.params[index].numel
    return found


def check_elementwise(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises UserError, naming the class, if one cannot be cut into slices."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__):
            raise UserError(
                f"comm='downpour' steps slices of parameters on their servers, which {kind.__module__}."
                f"{kind.__qualname__} may not allow: take one of torch.optim's own {', '.join(ELEMENTWISE)}"
            )


def places_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, Place]:
    """Of every parameter, by id. Raises UserError if two optimizers step the same one."""
    places: dict[int, Place] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if places.setdefault(id(p), Place(number, index)) != Place(number, index):
                    raise UserError("comm='downpour': two of the optimizers step the same parameter: leave one out")
    return places


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> Settings:
    """As they are now: what schedules change travels with the worker that pushes."""
    return [
        [
            {key: _plain(group[key]) for key in optimizer.defaults if key in group and key not in _HOW}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def _plain(value: Any) -> Any:
    return (
        [_plain(each) for each in value]
        if isinstance(value, (tuple, list))
        else (value.item() if isinstance(value, torch.Tensor) else value)
    )


def _part(settings: Settings, parts: int) -> Settings:
    """For one of P pushes, which together decay weights as one step does: what is pushed is the gradient of a P-th of
    the loss, of which the decay is a part."""
    decays = [[group.get("weight_decay") for group in its] for its in settings]
    return [
        [group | ({"weight_decay": decay / parts} if decay else {}) for group, decay in zip(its, each, strict=True)]
        for its, each in zip(settings, decays, strict=True)
    ]


class Source(NamedTuple):
    """A parameter's values, and its optimizer's state of it, when the servers begin."""

    values: torch.Tensor
    state: Mapping[str, Any]


class Slice:
    """One KV pair's values on their server.

    Attributes:
        values: [pair.length], flags of a merged unit included.
    """

    def __init__(self, its: list[Segment], length: int, dtype: torch.dtype) -> None:
        self.segments = its
        self.values = torch.empty(length, dtype=dtype)
        self._params = [nn.Parameter(self.values[s.start : s.start + s.length]) for s in its]
        self._optimizers: list[tuple[torch.optim.Optimizer, list[Place]]] = []
        self._settings: Settings | None = None

    def fill(
        self, sources: Sequence[Source], kinds: Sequence[str], places: Sequence[Place], settings: Settings
    ) -> None:
        """Take the first values; all arguments but `kinds` and `settings` by number of the parameter."""
        self.values.zero_()
        for number in sorted({places[s.param].optimizer for s in self.segments}):
            groups: dict[Place, list[nn.Parameter]] = {}
            for s, p in zip(self.segments, self._params, strict=True):
                if places[s.param].optimizer == number:
                    groups.setdefault(places[s.param], []).append(p)
            build = getattr(torch.optim, kinds[number])
            optimizer = build([{**settings[number][place.group], "params": ps} for place, ps in groups.items()])
            self._optimizers.append((optimizer, list(groups)))
        self._settings = settings
        for s, p in zip(self.segments, self._params, strict=True):
            whole, state = sources[s.param]
            p.detach().copy_(in_order(whole, whole)[s.offset : s.offset + s.length])
            self._optimizer(places[s.param]).state[p] = {key: _cut(key, v, whole, s) for key, v in state.items()}

    def _optimizer(self, place: Place) -> torch.optim.Optimizer:
        return next(optimizer for optimizer, its in self._optimizers if place in its)

    def step(self, data: torch.Tensor, there: Sequence[int], parts: int, settings: Settings) -> None:
        """One worker's gradient.

        Args:
            data: of the segments that have one, one after the other.
            there: by segment, whether it has one.
            parts: P; data / P is what is applied.
            settings: the worker's.
        """
        if settings is not self._settings:
            self._settings = settings
            for optimizer, places in self._optimizers:
                for group, place in zip(optimizer.param_groups, places, strict=True):
                    group.update(settings[place.optimizer][place.group])
        data, first = data / parts, 0
        for s, p, has in zip(self.segments, self._params, there, strict=True):
            p.grad = data[first : first + s.length] if has else None
            first += s.length if has else 0
        for optimizer, _ in self._optimizers:
            optimizer.step()
        for p in self._params:
            p.grad = None

    def state(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """(segment, key, value) of what the optimizers keep."""
        for slot, p in enumerate(self._params):
            for optimizer, _ in self._optimizers:
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield slot, key, value


def _cut(key: str, value: Any, whole: torch.Tensor, s: Segment) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if key in _ONCE:
        return value.clone()
    return in_order(value, whole)[s.offset : s.offset + s.length].clone()


def collect(
    parts: Sequence[Sequence[tuple[KVPair, list[Segment]]]], tensors: Mapping[str, torch.Tensor]
) -> tuple[list[tuple[list[Segment], torch.Tensor]], dict[int, dict[str, torch.Tensor]]]:
    """From all servers' :meth:`Slices.tensors`.

    Args:
        parts: by unit its pairs, each with what lies in it.

    Returns:
        (each pair's values; by parameter its state by key, in the order of the parameter's memory)
    """
    where = {f"{unit}.{pair.index}": its for unit, pairs in enumerate(parts) for pair, its in pairs}
    values = []
    found: dict[int, dict[str, list[tuple[int, torch.Tensor]]]] = {}
    for name, tensor in tensors.items():
        place, *of_state = name.split("/")
        if place in where and not of_state:
            values.append((where[place], tensor))
        elif place in where:
            s = where[place][int(of_state[0])]
            found.setdefault(s.param, {}).setdefault(of_state[1], []).append((s.offset, tensor))
    return values, {param: {key: _together(key, its) for key, its in state.items()} for param, state in found.items()}


def _together(key: str, its: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    if key in _ONCE:
        return its[0][1].clone()
    return torch.cat([value for _, value in sorted(its, key=lambda part: part[0])])


class Slices:
    """All slices of a model that one rank owns. After construction all belongs to the endpoint's thread, or to the
    training thread while no push is under way.

    Args:
        sources: by number of the parameter; None: there are no values, and nothing is computed.
        parts: P, the number of workers.
    """

    def __init__(
        self,
        book: Book,
        rank: int,
        kinds: Sequence[str],
        places: Sequence[Place],
        settings: Settings,
        sources: Sequence[Source] | None,
    ) -> None:
        self._parts = len(book.topology.workers)
        self._valued = sources is not None
        settings = _part(settings, self._parts)
        self._settings: dict[int, Settings] = dict.fromkeys(book.topology.workers, settings)  # by worker
        self._slices: dict[tuple[int, int], Slice] = {}
        for unit in book.units:
            dtype = getattr(torch, book.params[unit.params[0]].dtype.removeprefix("torch."))
            for pair in unit.pairs:
                if pair.server == rank:
                    its = self._slices[unit.index, pair.index] = Slice(segments(book, unit, pair), pair.length, dtype)
                    if sources is not None:
                        its.fill(sources, kinds, places, settings)

    def configure(self, worker: int, text: str) -> None:
        """What this worker pushes from now on is applied with other settings."""
        self._settings[worker] = _part(json.loads(text), self._parts)

    def push(self, worker: int, header: Header, data: torch.Tensor, there: Sequence[int] | None) -> torch.Tensor:
        """Apply a worker's gradient of one pair (as in :meth:`Slice.step`; `there` None: of all segments).

        Returns:
            The pair's new values, a copy.
        """
        its = self._slices[header.unit, header.pair]
        if not self._valued:
            return its.values
        its.step(data, there or [1] * len(its.segments), self._parts, self._settings[worker])
        return its.values.clone()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, by name: ``unit.pair`` the values, ``unit.pair/segment/key`` the state."""
        found = {}
        for (unit, pair), its in self._slices.items():
            found[f"{unit}.{pair}"] = its.values
            found.update({f"{unit}.{pair}/{slot}/{key}": value for slot, key, value in its.state()})
        return found
