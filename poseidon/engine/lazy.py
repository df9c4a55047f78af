"""overlap=full: backward() and step() return at once, and a layer's weights change when the next forward comes to them.

At the end of a backward pass the gradients that are under way are taken out of ``p.grad``, in whose place a
:class:`Promise` stands. The user's ``step()`` does nothing but note the settings (learning rate ...) which it saw. From
then on whoever looks at a module's parameters, or calls the module, waits for their averages, and applies all that are
in by a step of the user's optimizer for these parameters alone. So every layer waits for itself only, the front ones
first; and as every look finds what ``step()`` would have left, nobody can tell when it was made.

All of a round is applied before the next backward pass begins. So a rank that contributes to round t + 1 has all of
round t, as without this: what memory may be written again, and when, stays as it is (see
:class:`poseidon.schemes.average.Average`), and so does the way in which ranks find out that they are out of step.

A round is waited for at once, as with overlap=backward, where the optimizer may do anything but update each parameter
by itself, and where somebody looks at a gradient before the step (clipping, GradScaler).

Alternatives: applying averages from another thread would change weights under a forward pass that has begun. An
optimizer of our own per layer, as torchgrad's hooks make them, would have to copy the state of the user's, which
checkpoints and schedules must see; a step of the user's for some parameters has the same bits, and its state is there.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from poseidon.engine.exchange import Exchange
from poseidon.engine.partly import before_reads, empty, step, unfit
from poseidon.engine.passing import apart, plainly
from poseidon.engine.plan import Plan
from poseidon.engine.promise import Promise, promise
from poseidon.engine.settings import Settings
from poseidon.engine.stepping import Stepping
from poseidon.engine.watched import Access
from poseidon.errors import UserError
from poseidon.schemes import Share
from poseidon.transport import Owner

log = logging.getLogger("poseidon")

Item = tuple[int, int, Any]
_NOBODY_ELSE = 2  # references to an object: a variable, and the argument of sys.getrefcount()


@dataclass
class _Round:
    """One that has been sent, and is not applied.

    Attributes:
        local: by index of a parameter, its gradient as it was sent (memory that may be received into); as long as its
            average is not in ``p.grad`` or applied.
        promises: what stands in ``p.grad`` for it.
        missing: units whose results are not in.
        ready: (unit, result) that are in, and neither written nor applied.
        warn: called with n_r by rank when all is in.
        steps: of the optimizers that have been called, with their settings then.
        waiting: by id, the indices of parameters that are still to be stepped.
    """

    plan: Plan
    number: int
    warn: Callable[[int, Mapping[int, int]], None]
    missing: int
    local: dict[int, torch.Tensor | None] = field(default_factory=dict)
    promises: dict[int, Promise] = field(default_factory=dict)
    ready: list[tuple[int, Any]] = field(default_factory=list)
    steps: list[tuple[torch.optim.Optimizer, Settings]] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)


class Lazy:
    """Of one model and its optimizers.

    Args:
        take: waits for a plan's next result.
        write: of a weight that the devices of a node multiply out for each other, this one's share.
        stepping: is told of steps of our own.
    """

    def __init__(
        self,
        exchange: Exchange,
        take: Callable[[Plan], Item],
        write: Callable[[Plan, int, int, Any], None],
        stepping: Stepping,
    ) -> None:
        self._exchange, self._take, self._write, self._stepping = exchange, take, write, stepping
        self._own: dict[torch.optim.Optimizer, set[tuple[int, str]]] = {}  # by optimizer; see Settings
        self._undo: list[Callable[[], object]] = []
        self._round: _Round | None = None
        self._why: str | None = None  # this step's gradients are waited for at once
        self._looked = False  # at ``p.grad``, as this step's first backward pass found it
        self._closure = False
        self._unstepped = False  # since the last round
        self._said: set[str] = set()
        self._warned = False
        self._owner, self._thread = Owner(), 0
        self._blanks: dict[int, torch.Tensor] = {}  # by index, what a promise looks like
        self.access = Access(self._read)
        self._late: set[int] = set()  # ids of what nobody has looked at since the step

    # --- the model's parameters --------------------------------------------------------------------------------

    def before_module(self, module: nn.Module) -> None:
        ids = self.access.of(module)
        if ids and self._round is not None:
            self._exchange.check()
        if ids:
            self._read(ids)

    def before_forward(self) -> None:
        """Of the root module, with grad."""
        self.access.inside = True
        self._read(self.access.hidden)

    def _read(self, ids: Iterable[int]) -> None:
        """These parameters are looked at: what waits to be applied to them is waited for, and applied."""
        self.access.note(ids)
        if self._late:
            self._late.difference_update(ids)
        round_ = self._round
        if round_ is None or not round_.waiting or threading.get_ident() != self._thread or not self._owner.here():
            return
        if self._exchange.failure is not None:
            self._warn_of_parts()
            return
        for each in ids:
            if each in round_.waiting:
                self._until(round_, each)
        if not round_.missing and not round_.waiting:
            self.finish()

    def _until(self, round_: _Round, each: int) -> None:
        while True:
            self._poll(round_)
            self._apply(round_)  # all that is there: one step of many parameters costs less than many steps
            if each not in round_.waiting:
                return
            self._put(round_, self._take(round_.plan))

    # --- rounds ------------------------------------------------------------------------------------------------

    def opens(self, params: Sequence[torch.Tensor]) -> None:
        """A backward pass comes to the model, before it has made any of its gradients."""
        if self._round is not None:
            self._late |= self._round.waiting.keys()
            self.finish()
        if not self._looked:
            self._looked = True
            if self._unstepped and not self._closure:
                self._at_once("several backward passes are made for one step")
            elif any(p.grad is not None for p in params):
                self._at_once("p.grad is not None before backward(): zero_grad(set_to_none=False), or set by hand")

    def grows(self, p: torch.Tensor, name: str) -> None:
        """A gradient was made. Raises UserError if it is one of other weights than the step before left."""
        if not self._looked:
            self._looked = True
            self._at_once("gradients came through no output of the model")
        if id(p) in self._late:
            self._fail(
                f"{name} was used before the step that was due for it was made, without a look through its module (a "
                f"reference kept elsewhere?): call session.synchronize() before, or take overlap='backward'"
            )

    def waits(self, optimizers: Sequence[torch.optim.Optimizer], params: Sequence[torch.Tensor], trial: bool) -> bool:
        """Is the round that closes to be waited for at once? Else :meth:`closed` comes next."""
        if not self._looked:
            self.opens(params)
        for optimizer in optimizers:
            why = self._unfit(optimizer)
            if why is not None:
                self._at_once(why)
        if self.access.compiled():
            self._at_once("the model, or a part of it, is compiled")
        return trial or not self.access.known or self._why is not None

    def waited(self, seen: Iterable[int], params: Sequence[torch.Tensor]) -> None:
        """It was.

        Args:
            seen: indices of parameters that this rank made gradients of.
        """
        self.access.learn([id(params[index]) for index in seen])
        self._next()

    def _next(self) -> None:
        self._looked, self._why, self._unstepped = False, None, True
        self._late.clear()

    def closed(self, plan: Plan, number: int, warn: Callable[[int, Mapping[int, int]], None]) -> None:
        """This rank has sent all of a round: it waits no longer."""
        round_ = self._round = _Round(plan, number, warn, len(plan.book.units))
        for index, p in enumerate(plan.gradients.params):
            round_.local[index] = p.grad
            round_.promises[index] = p.grad = promise(self._blank(index, p), partial(self._keep, round_, index))
        if plan.book.topology.divides:
            self._multiply(round_)
        self._next()

    def _blank(self, index: int, p: torch.Tensor) -> torch.Tensor:
        blank = self._blanks.get(index)
        if blank is None or blank.shape != p.shape or blank.dtype != p.dtype:
            blank = self._blanks[index] = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
        return blank

    def _multiply(self, round_: _Round) -> None:
        """What a node's devices multiply out for each other is not put off: they may be waiting in a place of the
        user's which this one comes to later."""
        left = {unit.index for unit in round_.plan.book.units if unit.scheme == "sfb"}
        while left:
            item = self._take(round_.plan)
            left.discard(item[1])
            self._put(round_, item)

    def _put(self, round_: _Round, item: Item) -> None:
        number, unit, result = item
        if isinstance(result, Share):
            self._write(round_.plan, number, unit, result)
            return
        round_.ready.append((unit, result))
        round_.missing -= 1

    def _poll(self, round_: _Round) -> None:
        while round_.missing and (item := round_.plan.syncers.poll()) is not None:
            self._put(round_, item)

    def finish(self) -> None:
        """Wait for all of the round that is under way; apply it, or, before its step, leave it in ``p.grad``."""
        round_ = self._round
        if round_ is None:
            return
        while round_.missing:
            self._put(round_, self._take(round_.plan))
        self._apply(round_)
        self._round = None
        round_.warn(self._exchange.rank, round_.plan.syncers.rows_of(round_.number))

    def drain(self) -> None:
        """Make all steps, after waiting for their gradients."""
        if self._round is None or not self._round.steps:
            return
        if self._exchange.failure is not None:
            self._warn_of_parts()
        else:
            self.finish()

    def _keep(self, round_: _Round, index: int) -> torch.Tensor:
        """Somebody looks at a gradient."""
        if round_ is self._round:
            if not round_.steps:
                self._say("gradients are looked at between backward() and step() (clipping, GradScaler?)")
            self.finish()
        kept = round_.local.get(index)
        return torch.zeros_like(round_.plan.gradients.params[index]) if kept is None else kept

    # --- steps -------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, closure: object) -> torch.optim.Optimizer | None:
        """A step of the user's begins.

        Returns:
            What it is to go on with, if it is put off.
        """
        self._closure, self._unstepped = closure is not None, False
        round_ = self._round
        if round_ is None:
            return None
        ours = {id(p): index for index, p in enumerate(round_.plan.gradients.params)}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        why = self._objection(round_, optimizer, held, ours)
        if why is not None:
            self._say(why)
            self.finish()
            return None
        self._thread = threading.get_ident()
        if optimizer not in self._own:
            self._adopt(optimizer)
        round_.steps.append((optimizer, Settings(optimizer, self._own[optimizer])))
        round_.waiting |= {id(p): ours[id(p)] for p in held if id(p) in ours}
        return empty(optimizer)

    def _unfit(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why none of an optimizer's steps can be put off."""
        if self._closure:
            return "the optimizer steps with a closure"
        return unfit(optimizer)

    def _objection(
        self, round_: _Round, optimizer: torch.optim.Optimizer, held: list[torch.Tensor], ours: Mapping[int, int]
    ) -> str | None:
        """Why a step is not put off.

        Args:
            held: the optimizer's parameters.
            ours: indices of the model's, by id.
        """
        why = self._unfit(optimizer)
        if why is not None:
            return why
        if callable(get_eval_frame_callback()):  # of this thread, unlike torch.compiler.is_compiling()
            return "the optimizer's step is compiled"
        if self.access.compiled():
            return "the model, or a part of it, is compiled"
        if any(id(p) in round_.waiting for p in held):
            return "two optimizers step the same parameters"
        for p in held:
            index = ours.get(id(p))
            if index is None and p.grad is not None:
                return f"{type(optimizer).__name__} also steps parameters that are not of this model"
            if index is not None and p.grad is not round_.promises.get(index):
                return "gradients are assigned between backward() and step()"
        return None

    def _apply(self, round_: _Round) -> None:
        if round_.ready:
            plainly(partial(self._apply_ready, round_))

    def _apply_ready(self, round_: _Round) -> None:
        """Averages that are in go to ``p.grad``, as far as a promise stands there, and after the user's step to the
        parameters."""
        units = round_.plan.book.units
        ready, round_.ready = round_.ready, []
        gradients = round_.plan.gradients
        indices = [index for unit, _ in ready for index in units[unit].params]
        self._check_alike(gradients.altered(indices))
        users = [gradients.params[index].grad for index in indices]
        with apart(gradients.params):
            for index in indices:
                gradients.params[index].grad = round_.local[index]
            for unit, result in ready:
                gradients.apply(units[unit], result)
            self._step(round_, {id(gradients.params[index]) for index in indices})
        for index, user in zip(indices, users, strict=True):
            p, made = gradients.params[index], round_.promises.pop(index)
            round_.local[index] = p.grad
            if user is not made:
                p.grad = user
                if sys.getrefcount(made) <= _NOBODY_ELSE:
                    del round_.local[index]

    def _step(self, round_: _Round, only: set[int]) -> None:
        """Steps of our own, of these parameters alone."""
        only &= round_.waiting.keys()
        for optimizer, settings in round_.steps if only else ():
            self._stepping.ours = True
            try:
                step(optimizer, settings, only)
            finally:
                self._stepping.ours = False
        for each in only:
            del round_.waiting[each]

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        self._own[optimizer] = set()
        self._undo += before_reads(optimizer, self.drain)

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()

    def close(self) -> None:
        """What is not applied is dropped, with the promises."""
        self._leave()
        round_, self._round = self._round, None
        if round_ is None:
            return
        if round_.waiting:
            self._warn_of_parts()
        for index, made in round_.promises.items():
            p = round_.plan.gradients.params[index]
            if p.grad is made:
                p.grad = None

    # --- words -------------------------------------------------------------------------------------------------

    def _at_once(self, why: str) -> None:
        """The round that is being made is to be waited for."""
        self._why = why
        self._say(why)

    def _say(self, why: str) -> None:
        if why not in self._said and self._exchange.rank == 0:
            log.warning("overlap=full falls back to overlap=backward: %s", why)
        self._said.add(why)

    def _warn_of_parts(self) -> None:
        if not self._warned:
            log.warning(
                "rank %d: the last step was made for some layers only, as averages have not come: the model's weights "
                "are between two iterations",
                self._exchange.rank,
            )
        self._warned = True

    def _check_alike(self, name: str | None) -> None:
        if name is not None:
            self._fail(
                f"{name} was changed in type, shape or order in memory while its step waits to be made: call "
                f"session.synchronize() before"
            )

    def _fail(self, text: str) -> None:
        error = UserError(f"rank {self._exchange.rank}: {text}")
        self._exchange.fail(error)
        raise error
