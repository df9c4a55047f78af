"""Stale synchronous parallel training, SSP(s): gradients leave as ever, their averages are applied later (P15, section
2; Ho et al. 2013).

An iteration t computes with G_c, the initial state plus the averaged gradients of rounds 0..c, each applied by the
user's own optimizer with the settings (learning rate ...) of its own iteration: max(-1, t-1-s) <= c <= t-1, c never
decreasing. So every worker goes through the same states, and only how far it is differs. c is fixed where a backward
pass ends: the newest round that is complete, after waiting for the bound alone; or, where runs must be reproducible,
always the bound. Unlike Petuum's, a worker does not see its own gradients earlier than those of others.

The newest average that is due stands in ``p.grad`` when ``backward()`` returns. Inside the user's ``step()`` each that
is due is applied by a step of our own, and the user's is passed by (:mod:`poseidon.engine.passing`): so what counts
steps counts averages, on every rank alike.

Alternatives: an optimizer of our own on the servers would know a few optimizers only; applying averages from a thread
would change weights in the middle of an iteration.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.hooks import RemovableHandle

from poseidon.engine.backward import Hook
from poseidon.engine.exchange import Exchange
from poseidon.engine.passing import apart, pass_by, plainly, stand_in
from poseidon.engine.plan import Plan
from poseidon.engine.settings import Settings
from poseidon.engine.stepping import Stepping
from poseidon.errors import UserError

log = logging.getLogger("poseidon")

Item = tuple[int, int, Any]


@dataclass
class Late:
    """A round that has been sent, and is not applied.

    Attributes:
        results: (unit, result) as far as they are in.
        settings: of the optimizer at that iteration's step; None before it.
    """

    plan: Plan
    round: int
    results: list[tuple[int, Any]] = field(default_factory=list)
    settings: Settings | None = None

    @property
    def whole(self) -> bool:
        return len(self.results) == len(self.plan.book.units)

    def write(self) -> None:
        """The averages to ``p.grad``."""
        gradients = self.plan.gradients
        clear(gradients.params)
        for unit, result in self.results:
            gradients.apply(self.plan.book.units[unit], result)


class Staleness:
    """Of one model and its optimizer. All methods belong to the training thread.

    Args:
        bound: s.
        fixed: apply what the bound demands and no more, however much is complete.
        take: waits for a plan's next result.
        stepping: notices the user's steps, and is told of our own.
        read: weights are about to be read; drains, if it is not the middle of an iteration.
    """

    def __init__(
        self,
        exchange: Exchange,
        bound: int,
        fixed: bool,
        take: Callable[[Plan], Item],
        stepping: Stepping,
        read: Callable[[], None],
    ) -> None:
        self._exchange, self._take, self._stepping, self._read = exchange, take, stepping, read
        stepping.passes = True
        self._bound, self._fixed = bound, fixed
        self.applied = -1  # c
        self._inside = False  # a step, whoever's, that applies something; one that raised has no end
        self._late: deque[Late] = deque()
        self._due: list[Late] = []  # what the next step applies
        self._optimizer: torch.optim.Optimizer | None = None
        self._warned = False
        self._own: set[tuple[int, str]] = set()  # see Settings
        self._handles: list[RemovableHandle] = []
        self._written: list[_Seen] = []  # p.grad, as backward() left it
        self._spent: list[_Seen] = []  # and as step() did
        self._unzeroed = False

    # --- rounds ------------------------------------------------------------------------------------------------

    def closed(self, plan: Plan, round_: int) -> list[Late]:
        """This rank has sent all of a round: fix what the next iteration computes with.

        Returns:
            The rounds that are due with the next step.
        """
        if self._late and self._late[-1].settings is None:
            self._fail(
                f"backward pass {round_} before the step of the one before it: with comm.staleness every step has one "
                f"backward pass that synchronises; put all others inside session.no_sync(), and freeze "
                f"a model that only passes gradients on (requires_grad_(False))"
            )
        self._late.append(Late(plan, round_))
        least = round_ - self._bound
        self._receive(round_ if plan.trial else least)
        self._due = []
        for late in self._late:
            if not late.whole or (self._fixed and late.round > least):
                break
            self._due.append(late)
        c = self._due[-1].round if self._due else self.applied
        assert max(self.applied, least) <= c <= round_, (round_, c, self.applied)
        if self._due:
            self._due[-1].write()
        else:
            clear(plan.gradients.params)
        self._written = _see(plan.gradients.params)
        return self._due

    def _receive(self, until: int) -> None:
        """Take what is there, and wait for all rounds up to `until`."""
        for late in list(self._late):
            while (item := late.plan.syncers.poll()) is not None:
                self._put(item)
            while late.round <= until and not late.whole:
                self._put(self._take(late.plan))

    def _put(self, item: Item) -> None:
        round_, unit, result = item
        self._late[round_ - self._late[0].round].results.append((unit, result))

    # --- iterations --------------------------------------------------------------------------------------------

    def look(self, trained: Container[int]) -> None:
        """A backward pass begins: perhaps one that adds to ``p.grad``, where the average that the last step applied may
        still be.

        Args:
            trained: ids of the model's parameters; others may keep what they have.
        """
        self._unzeroed = any(id(seen.p) in trained and seen.unchanged() and seen.any() for seen in self._spent)

    def begin(self) -> None:
        """The first gradient of an iteration was made.

        Raises:
            UserError: it was added to what the last step has applied.
        """
        self._spent = []
        if self._unzeroed:
            self._fail(
                "gradients are not zeroed between the steps: with comm.staleness p.grad is the average of an earlier "
                "iteration, to which nothing can be added; call optimizer.zero_grad()"
            )

    def before_step(self, optimizer: torch.optim.Optimizer, closure: object) -> torch.optim.Optimizer:
        """A step of the user's begins. Applies what is due, the newest as it is in ``p.grad``.

        Returns:
            What the user's step is to go on with.

        Raises:
            UserError: a step that would not be the same on every rank.
        """
        if closure is not None:
            self._fail("a step with a closure: with comm.staleness an optimizer must step on gradients that are there")
        if callable(get_eval_frame_callback()):  # of this thread, unlike torch.compiler.is_compiling()
            self._fail(
                "a compiled optimizer step: with comm.staleness averages are also applied outside of it, in plain "
                "steps whose bits differ; do not compile step()"
            )
        newest = self._late[-1]
        if self._inside:
            self._fail("the optimizer's step before this one ended in an exception: this run cannot go on")
        if optimizer is not self._optimizer:
            if newest.settings is not None:
                self._fail("a second optimizer steps this model: with comm.staleness there must be one for each model")
            self._adopt(optimizer)
        params = newest.plan.gradients.params
        ids = {id(p) for p in params}
        if any(id(p) not in ids and p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self._fail(
                f"{type(optimizer).__name__} also steps parameters that are not of this model: with comm.staleness one "
                f"step may be several, or none; make an optimizer of their own for them"
            )
        newest.settings = Settings(optimizer, self._own)
        written, self._written = self._written, []
        if not self._fixed and not all(seen.unchanged() for seen in written):
            self._fail(
                "gradients were changed between backward() and step() (clipping?): with comm.staleness several may be "
                "applied in one step; change them in optimizer.register_step_pre_hook(), or set "
                "comm.staleness_mode=fixed"
            )
        due, self._due = self._due, []
        newest_due = [p.grad for p in params]
        for late in due[:-1]:
            self._apply(late)
        for p, grad in zip(params, newest_due, strict=True):
            p.grad = grad
        if due:
            self._apply(due[-1], write=False)
        self._inside = True
        held = [p for group in optimizer.param_groups for p in group["params"]]
        pass_by(optimizer, {*params, *held}, partial(self._passed, held if due else []))
        return stand_in(optimizer)

    def _passed(self, held: list[torch.Tensor]) -> None:
        """The user's step is over, in which these parameters got what is in ``p.grad``."""
        self._inside = False
        if held:
            self._spent = [seen for seen in _see(held) if seen.grad is not None]

    def drain(self) -> None:
        """Apply all that this rank has stepped for, after waiting for it: then its weights are those of every rank that
        has made as many steps. Inside a step (a hook of the user's that reads weights) they stay as they are.

        Raises:
            UserError: there are other weights than when it was sent.
        """
        if not self._inside and self._stepped:
            self._drain(self._stepped)

    def _drain(self, stepped: list[Late]) -> None:
        gradients = stepped[-1].plan.gradients
        name = gradients.altered()
        if name is not None:
            self._fail(
                f"{name} was changed in type, shape or order in memory while averages wait to be applied to it: call "
                f"session.synchronize() before"
            )
        self._receive(stepped[-1].round)
        params = gradients.params
        # Gradients that are being accumulated stay; one that was due is now applied.
        kept = [None if self._due else p.grad for p in params]
        self._due, self._written = [], []
        for late in stepped:
            self._apply(late)
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad

    def warn_not_drained(self) -> None:
        """A state_dict is made in the middle of an iteration."""
        if self._stepped and not self._inside and not self._warned:
            self._warned = True
            log.warning(
                "rank %d: a state_dict made in the middle of an iteration (a backward pass before its step, an output "
                "of the model still held) lacks averages that are under way: call session.synchronize() before, and "
                "evaluate under torch.no_grad()",
                self._exchange.rank,
            )

    @property
    def _stepped(self) -> list[Late]:
        return [late for late in self._late if late.settings is not None]

    @property
    def between(self) -> bool:
        """Has everything that was sent been stepped for?"""
        return not self._late or self._late[-1].settings is not None

    def _apply(self, late: Late, *, write: bool = True) -> None:
        plainly(partial(self._step, late, write=write))

    def _step(self, late: Late, *, write: bool) -> None:
        """One of our own."""
        assert self._optimizer is not None
        assert late.settings is not None
        assert late.round == self.applied + 1 == self._late[0].round
        with apart(late.plan.gradients.params):
            if write:
                late.write()
            late.settings.enter()
            self._inside = self._stepping.ours = True
            self.applied = late.round
            try:
                self._optimizer.step()
            finally:
                self._stepping.ours = False
            late.settings.leave()
            self._inside = False
        self._late.popleft()

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on this one steps; what is left of the steps of another is applied by that."""
        self.drain()
        self.close()
        self._optimizer, self._own = optimizer, set()
        self._handles = [
            optimizer.register_state_dict_pre_hook(Hook(lambda *_: self._read())),
            optimizer.register_load_state_dict_pre_hook(Hook(lambda *_: self.drain())),
        ]

    def close(self) -> None:
        """Take the hooks off the optimizer."""
        while self._handles:
            self._handles.pop().remove()

    def _fail(self, text: str) -> None:
        error = UserError(f"rank {self._exchange.rank}: {text}")
        self._exchange.fail(error)
        raise error


class _Seen:
    """A parameter's gradient as it was."""

    def __init__(self, p: torch.Tensor) -> None:
        grad = p.grad
        self.p = p
        self.grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version

    def unchanged(self) -> bool:
        grad = self.p.grad
        if grad is None or self.grad is None:
            return grad is None and self.grad is None
        return grad is self.grad() and grad._version == self._version

    def any(self) -> bool:
        """Is there anything in it? Zeroing through ``p.grad.data`` shows in no version."""
        grad = self.p.grad
        return grad is not None and bool((grad.coalesce().values() if grad.is_sparse else grad).any())


def _see(params: Iterable[torch.Tensor]) -> list[_Seen]:
    return [_Seen(p) for p in params if p.numel()]


def clear(params: Iterable[torch.Tensor]) -> None:
    for p in params:
        p.grad = None
