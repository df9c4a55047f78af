"""comm=downpour: asynchronous training by a parameter server, a baseline of the papers (Dean et al. 2012, Le et al.
2012, the CPU systems that P15, section 2, sets out from).

A worker pushes its own gradients when its optimizer would step, takes whatever fresh weights have come by then, and
goes on; it never waits for other workers. The servers, the plan's shards, apply each push as it comes: the user's
optimizer on their slices, with g_r / P, so that P workers together move the weights as far as one averaged step and a
learning rate means the same under every comm; then they answer with the slice's new values. (Weight decay counts a
P-th, too. Optimizers that divide by the gradient's size, Adam and its kin, undo the 1 / P and want a smaller rate.) So
nothing is exact or repeatable, replicas differ while training, and :meth:`Downpour.settle` makes them alike. Petuum's
SSP bounds how far workers may be apart; here nothing does.

One bound remains, on memory: of each unit at most two pushes may be unanswered. One is on its way while the next is
made; a third would only queue behind them, as a push is answered as soon as it is applied.

It watches optimizer steps, not gradients: accumulation, clipping, GradScaler and no_sync() need nothing of it. The
alternative, hooks as the engine's, would send under the backward pass, but what it sends could not be clipped, and it
has all of the next iteration to hide under anyway.

What the optimizer keeps (momentum ...) lies on the servers. Making all alike brings it to every rank, with the weights,
so that a checkpoint is whole; the alternative, checkpoints without it, would make resumed runs others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from poseidon.engine.backward import Hook
from poseidon.engine.broadcast import TAG_SLICES, TAG_TENSORS, broadcast, give_named, take_named
from poseidon.engine.device import Device
from poseidon.engine.embedding import refuse
from poseidon.engine.exchange import Exchange
from poseidon.engine.parameters import check_distributable, trainable
from poseidon.engine.plan import Options
from poseidon.engine.pushes import PLAN, Pushes
from poseidon.engine.reference import Reference
from poseidon.engine.slices import (
    Slices,
    Source,
    check_elementwise,
    collect,
    places_of,
    settings_of,
)
from poseidon.engine.start import agree, manifest
from poseidon.engine.state import share_state
from poseidon.engine.steps import holds, watch
from poseidon.errors import UserError
from poseidon.planning import Book, Decision, Topology, build_book
from poseidon.schemes import shaped

#: Mailbox tag of the meeting of all ranks.
TAG_MEET = 11


class Standing(NamedTuple):
    """The one plan that there is."""

    book: Book
    version: int
    rounds: int
    trial: bool = False


class Downpour(Reference):
    """One model and its optimizers. All methods belong to the training thread.

    Args:
        device: where gradients are made, if not on this host.

    Raises:
        UserError: ranks whose models differ; an optimizer that cannot step slices; nodes with several devices, or
            ranks that only serve.
    """

    #: What a report reads; see :class:`poseidon.engine.report.Planned`.
    decision = Decision({}, {})

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        exchange: Exchange,
        index: int,
        options: Options,
        device: Device,
    ) -> None:
        _check_topology(exchange.topology)
        if device.where.type != "cpu":
            raise UserError("comm='downpour' trains on the CPU: leave the model there, or take another comm")
        check_distributable(model, device.where)
        refuse(model, capture=True)
        if device.has_values:
            check_elementwise(optimizers)
        places = places_of(optimizers)
        self._model, self._optimizers, self._exchange, self._index = model, optimizers, exchange, index
        self._valued = device.has_values
        self._broadcasts = 0
        agree(exchange, index, manifest(model, vars(options), optimizers), device.where)
        if self._valued:
            state = [*model.parameters(), *model.buffers()]
            broadcast(exchange, index, self._next_tag(), state, "initial state")
            share_state(exchange, index, self._next_tag(), optimizers)
        params, infos = trainable(model)
        stepped = [number for number, p in enumerate(params) if id(p) in places]
        self._params = [params[number] for number in stepped]
        self._by_id = {id(p): number for number, p in enumerate(self._params)}
        self._places = [places[id(p)] for p in self._params]
        self.book = build_book(
            [infos[number] for number in stepped],
            exchange.topology,
            kv_bytes=options.kv_bytes,
            merge_bytes=options.merge_bytes,
        )
        self._settings = settings_of(optimizers)
        kinds = [type(optimizer).__name__ for optimizer in optimizers]
        slices = Slices(self.book, exchange.rank, kinds, self._places, self._settings, self._sources())
        self._slices = slices
        self._pushes = Pushes(exchange, index, device, self.book, self._params, slices)
        self.meet: Callable[[torch.optim.Optimizer], None] | None = None  # called before every step
        self._steps: Counter[int] = Counter()  # by optimizer
        self._pushed = False  # since all were made alike
        self._idle: set[int] = set()  # optimizers whose next step is without rows on this rank
        self._undo = [watch(Hook(self._before_step))]
        if self._valued:
            hook = Hook(self._before_save)
            self._undo += [optimizer.register_state_dict_pre_hook(hook).remove for optimizer in optimizers]

    def _sources(self) -> list[Source] | None:
        if not self._valued:
            return None
        states = (self._optimizers[place.optimizer].state for place in self._places)
        return [Source(p.detach(), its.get(p, {})) for p, its in zip(self._params, states, strict=True)]

    # --- figures -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Standing:
        return Standing(self.book, PLAN, self.planned_rounds)

    @property
    def planned_rounds(self) -> int:
        """Iterations: steps of the optimizer that makes most."""
        return max(self._steps.values(), default=0)

    @property
    def stall_seconds(self) -> float:  # type: ignore[override]
        return self._pushes.stall_seconds

    # --- a step ------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Of any optimizer. One of ours finds no gradient any more, and does nothing by itself."""
        number = next((n for n, one in enumerate(self._optimizers) if one is optimizer), None)
        if number is None:
            if holds(optimizer, self._by_id):
                self._fail(
                    f"{type(optimizer).__name__} steps parameters of a model under comm='downpour', but was not given "
                    "to session.distribute(): the servers step with the optimizers that were"
                )
            return
        self._exchange.check()
        if self.meet is not None:
            self.meet(optimizer)
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            self._fail(
                f"{type(optimizer).__name__}.step(closure) under comm='downpour', where the servers step and have no "
                "closure: call backward() before, and step() without"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            self._fail("a GradScaler leaves unscaling to a fused optimizer: under comm='downpour' leave fused=True out")
        settings = settings_of(self._optimizers)
        if settings != self._settings:  # by a schedule
            self._settings = settings
            self._pushes.configure(settings)
        self._push(optimizer, idle=number in self._idle)
        self._pushes.fresh()
        self._steps[number] += 1
        self._idle.discard(number)

    def _push(self, optimizer: torch.optim.Optimizer, idle: bool) -> None:
        """All gradients of what it steps, unless they are of no rows; they are gone then."""
        there: set[int] = set()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and id(p) in self._by_id:
                    there.add(self._by_id[id(p)])
                elif p.grad is not None:
                    self._check_unknown(p)
        for unit in () if idle else self.book.units:
            if not there.isdisjoint(unit.params):
                self._pushed = True
                self._pushes.push(unit, there)
        for index in there:
            self._params[index].grad = None

    def _check_unknown(self, p: torch.Tensor) -> None:
        name = next((name for name, its in self._model.named_parameters() if its is p), None)
        if name is not None:
            self._fail(
                f"parameter {name} was frozen, another one or in no optimizer at session.distribute(comm='downpour'), "
                "so the servers do not have it: call session.undistribute(model), then distribute again"
            )

    def _fail(self, message: str) -> None:
        self._exchange.fail(UserError(message))
        self._exchange.check()

    # --- making all alike --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Collective: all pushes are applied, and every rank has the weights and optimizer state that came of them."""
        self._exchange.check()
        self._pushes.drain()
        if self._meet(self._pushed) and self._valued:
            self._gather()
        self._pushed = False

    def _meet(self, mine: bool) -> bool:
        """Collective: nobody goes on before all have come. Returns whether any rank says yes."""
        exchange, index, others = self._exchange, self._index, range(1, self._exchange.world_size)
        if exchange.rank:
            exchange.say(0, index, TAG_MEET, json.dumps(mine))
            return bool(json.loads(exchange.hear(0, index, TAG_MEET, "word that all pushes are applied")))
        said = [exchange.hear(peer, index, TAG_MEET, "session.synchronize()") for peer in others]
        answer = mine or any(json.loads(each) for each in said)
        for peer in others:
            exchange.say(peer, index, TAG_MEET, json.dumps(answer))
        return answer

    @torch.no_grad()
    def _gather(self) -> None:
        """What the servers have, to all. Nobody has it, and pushes again, before every server has given."""
        exchange, index = self._exchange, self._index
        owners = {pair.server for unit in self.book.units for pair in unit.pairs}
        tensors = self._slices.tensors()
        if exchange.rank in owners:
            peers = [peer for peer in range(exchange.world_size) if peer != exchange.rank]
            give_named(exchange, index, TAG_SLICES, tensors, peers)
        for server in sorted(owners - {exchange.rank}):
            tensors |= take_named(exchange, index, TAG_SLICES, "slices of parameters", server)[1]
        values, states = collect(self._pushes.parts, tensors)
        for its, new in values:
            self._pushes.write(its, new)
        for number, state in states.items():
            p = self._params[number]
            shapes = {key: shaped(its, p) if its.numel() == p.numel() else its for key, its in state.items()}
            self._optimizers[self._places[number].optimizer].state[p] = shapes

    def _before_save(self, optimizer: torch.optim.Optimizer) -> None:
        if self._pushed:
            raise UserError(
                "comm='downpour': the servers have the optimizer's state; call session.synchronize() on all ranks "
                "before state_dict()"
            )

    # --- what a session offers ---------------------------------------------------------------------------------

    def rows(self, n: int) -> None:
        """Only whether there are any: every push weighs 1/P."""
        self._idle = set() if n else set(range(len(self._optimizers)))

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def sync_buffers(self, model: nn.Module) -> None:
        """Collective: rank 0's buffers; while training each rank has its own."""
        if self._valued:
            broadcast(self._exchange, self._index, self._next_tag(), list(model.buffers()), "buffers")

    def synchronize(self, model: nn.Module) -> None:
        self.settle()
        self.sync_buffers(model)

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.settle()
        yield

    def _next_tag(self) -> int:
        self._broadcasts += 1
        return TAG_TENSORS + self._broadcasts - 1

    def undo(self) -> None:
        self.settle()
        self.close()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._pushes.close()


def _check_topology(topology: Topology) -> None:
    if any(len(ranks) > 1 for ranks in topology.nodes):
        raise UserError("comm='downpour' has one worker per node: with several devices in a node take another comm")
    if not all(map(topology.works, topology.servers)):
        raise UserError("comm='downpour' keeps its slices on worker nodes: give servers as a list of those that serve")
