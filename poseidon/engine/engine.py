"""Wait-free backpropagation (DWBP; P15, section 4.1, P17, section 3.1) on a plain PyTorch model, in place.

A *round* is one synchronisation of all gradients: it opens in the first hook of a backward pass, sends each
unit as soon as its gradients are final, and closes at the end of that pass, when all results are in. A rank
whose loss misses the model closes its round in the optimizer's pre-step hook, so that its peers do not hang.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from poseidon.engine.backward import Hook, nested
from poseidon.engine.basis import basis_of
from poseidon.engine.broadcast import TAG_TENSORS, broadcast
from poseidon.engine.buffers import Buffers
from poseidon.engine.capture import Record, self_test
from poseidon.engine.changes import Agreed, Change
from poseidon.engine.device import Device, Host
from poseidon.engine.embedding import refuse
from poseidon.engine.exchange import Exchange
from poseidon.engine.forwards import Forward, StepRows
from poseidon.engine.inputs import Reading, leading_rows
from poseidon.engine.lazy import Lazy
from poseidon.engine.memory import check_memory
from poseidon.engine.negotiation import negotiate
from poseidon.engine.outgoing import Outgoing
from poseidon.engine.parameters import (
    check_distributable,
    held,
    record_factors,
    tensors_in,
    trainable,
    whole_is_compiled,
)
from poseidon.engine.plan import Options, Plan
from poseidon.engine.staleness import Staleness
from poseidon.engine.start import agree, manifest
from poseidon.engine.state import share_state
from poseidon.engine.stepping import Stepping
from poseidon.engine.steps import holds
from poseidon.errors import PoseidonError, UserError
from poseidon.planning import Decision, FactorSize, Timing, compulsory
from poseidon.schemes import Share

log = logging.getLogger("poseidon")


class Engine:
    """Hooks one model and its optimizers. All methods belong to the training thread.

    Args:
        device: where gradients are made, if not on this host.
        ranks_here: ranks of this machine, which share its memory.
        sizes: of the factors that iteration 0 would tell, equal on all ranks: then nothing needs finding out.
        timing: of the cluster, which comm.rule=time and comm.sparse=auto else measure, and of the layers; equal on all
            ranks.
        plan: with options.replays, what is replayed: a file, or what it holds; rank 0's counts.

    Raises:
        UserError: the ranks' models differ, or this model cannot be distributed yet.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        exchange: Exchange,
        index: int,
        options: Options,
        device: Device | None = None,
        ranks_here: int = 1,
        sizes: Mapping[str, FactorSize] | None = None,
        timing: Timing | None = None,
        plan: str | Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> None:
        self._device = device or Host()
        check_distributable(model, self._device.where)
        self.options = options
        self._sizes, self._ranks_here = sizes, ranks_here
        self.round = 0
        self.planned_rounds = 0  # closed under decided plans
        self.stall_seconds = 0.0
        self.decision = Decision({}, {})
        self._model, self._exchange, self._index = model, exchange, index
        self._step_rows = StepRows(options.rows == "equal")
        self._broadcasts = 2  # made so far: each has a tag of its own
        self._sync = True
        self._accumulates = False  # are gradients being made for the next step? Of interest where they may be stale
        self._absent = False  # has this rank left the training loop, and goes along with the others' rounds only?
        self.stepping = Stepping(exchange.rank, self._concerned, self._begin_step)
        self._stale: Staleness | None = None
        if options.staleness:
            fixed = options.staleness_mode == "fixed"
            self._stale = Staleness(
                exchange, options.staleness, fixed, self._take, self.stepping, self._before_state_dict
            )
        self._lazy: Lazy | None = None
        if options.overlap == "full" and not options.staleness:
            self._lazy = Lazy(exchange, self._take, self._write, self.stepping)
        self._optimizers = optimizers
        agree(exchange, index, manifest(model, vars(options), optimizers), self._device.where)
        self._basis = basis_of(exchange, index, model, options, self._device, timing, plan)
        if self._device.has_values:
            state = [*model.parameters(), *model.buffers()]
            broadcast(exchange, index, TAG_TENSORS, state, "initial state")
            share_state(exchange, index, TAG_TENSORS + 1, optimizers)
        self._undo: list[Callable[[], None]] = []
        self._bell: Callable[[], None] | None = None
        self._read_model(0)
        self.stepping.watch()

    @property
    def awaits(self) -> int | None:
        """The oldest round some results of which are not in."""
        return self.plan.syncers.oldest

    # --- set-up ------------------------------------------------------------------------------------------------

    def _read_model(self, version: int) -> None:
        """Hooks the model's parameters as they are now, under a plan by PS of that version."""
        self._params, self._infos = trainable(self._model)
        self._by_id = {id(p): i for i, p in enumerate(self._params)}
        self._agreed = Agreed(self._model, self._by_id, self._device.where)
        self._records: dict[int, Record] = {}
        self.decision = Decision({}, {})
        self.buffers = Buffers(self._model, self._exchange, self._index)
        self._capture()
        self._install(version, compulsory(self._infos))
        if self._sizes is not None:
            seen = [dict(self._sizes)] * len(self._exchange.topology.workers)
            self._adopt(self._basis.decide(self._infos, seen, self._exchange))
        self._hook()
        self._new_round()

    def _notice_changes(self) -> bool:
        """Parameters may have been unfrozen, replaced or changed in place: then all ranks agree anew. Looked at before
        each forward pass, where a round opens and, on a rank that has neither, where it steps.
        Collective if there are any changes, as the user's code is the same everywhere.

        Returns:
            False if it is a call with borrowed parameters, none of them ours, or traced: its rows are not this step's.
        """
        if self._out.final:  # under way
            return True
        self._looked = True
        change = self._agreed.look()
        if change in (Change.UNFROZEN, Change.REPLACED):
            self._agree_anew(change is Change.REPLACED)
        return change is not Change.ALIEN

    def _agree_anew(self, replaced: bool) -> None:
        self.drain()
        if self._lazy is not None:
            self._lazy.finish()
        self.plan.syncers.leave(self.round)
        self.buffers.catch_up()
        self._unhook()
        exchange, index = self._exchange, self._index
        buffers = list(self._agreed.new_buffers())
        rows = manifest(self._model, vars(self.options), self._optimizers, buffers)
        agree(exchange, index, [*rows, ["replaced parameters", str(replaced)]], self._device.where)
        if replaced:
            state = [*self._model.parameters(), *(buffer for _, buffer in buffers)]
            broadcast(exchange, index, self._next_tag(), state, "replaced parameters")
        self._read_model(self.plan.version + (2 if self.plan.trial else 1))
        self._looked = True

    def _capture(self) -> None:
        capable = self_test()
        refuse(self._model, capable)
        if not capable:
            log.warning("this torch's autograd behaves otherwise than factor capture needs: all layers go dense (PS)")
            return
        self._records = record_factors(self._model, self._params, linear=self.options.comm != "ps")
        for record in self._records.values():
            record.paused = not self._sync
            self._undo.append(record.close)

    def _install(self, version: int, schemes: dict[str, Any]) -> None:
        """Adopt a plan."""
        self.plan = Plan(
            self._exchange,
            self._index,
            version,
            self._infos,
            self._params,
            self._records,
            schemes,
            self.options,
            self._device,
            self.decision.sparse,
        )
        self.plan.syncers.listen(self._bell)
        if self._stale is not None and (not self.plan.trial or self.options.comm == "ps"):
            self._check_memory()

    def _check_memory(self) -> None:
        factors, has_values = self.decision.factors, self._device.has_values
        try:
            check_memory(
                self.plan.book,
                self._exchange.rank,
                factors,
                self.options.staleness,
                self._ranks_here,
                has_values=has_values,
            )
        except UserError as error:
            self._exchange.fail(error)
            self._exchange.check()

    def _hook(self) -> None:
        handles: list[RemovableHandle] = [
            self._model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            self._model.register_forward_hook(Hook(self._after_forward)),
            self._model.register_forward_hook(Hook(self._leave_forward), always_call=True),
            self._model.register_state_dict_pre_hook(Hook(self._before_state_dict)),
        ]
        for p in self._params:
            handles.append(p.register_post_accumulate_grad_hook(Hook(self._after_grad)))
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(Hook(self._before_module)))
            if self._stale is not None:
                handles.append(module.register_load_state_dict_pre_hook(Hook(lambda *_: self.drain())))
        handles += self.buffers.hook()
        if self._lazy is not None:
            self._lazy.access.hook(self._model, self._by_id)
            self._undo.append(self._lazy.access.unhook)
        self._undo += [handle.remove for handle in handles]

    def _new_round(self) -> None:
        self._task: int | None = None  # autograd's id of the backward pass that this round belongs to
        self._out = Outgoing(self.plan, self.round, self._step_rows)
        self._late: set[int] = set()  # parameters under reentrant checkpoints
        self._leftover = False
        self._step_rows.new_round()
        self._in_forward = False
        self._looked = False  # at the parameters
        self._reading: Reading | None = None  # of the forward pass that runs, or ran last

    # --- forward -----------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._exchange.check()
        if self._task is not None and torch._C._current_graph_task_id() == -1:
            self._aborted()
        self.buffers.catch_up()
        self._in_forward = torch.is_grad_enabled() and self._notice_changes()
        self._reading = leading_rows(args, kwargs) if self._in_forward else None
        if self._lazy is not None and torch.is_grad_enabled():
            self._lazy.before_forward()
        if module.training:
            self.buffers.begin()
        else:
            if not torch.is_grad_enabled():
                self._drain_between()
            self.buffers.fetch()

    def _aborted(self) -> None:
        """The last backward pass ended in an exception."""
        if self._out.final:
            self._exchange.fail(
                PoseidonError(
                    f"a backward pass of rank {self._exchange.rank} failed after gradients had left for other ranks: "
                    "this run cannot go on"
                )
            )
            self._exchange.check()
        for record in self._records.values():
            record.factors.clear()
        self._step_rows.drop(self._task)
        self._new_round()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        """A forward without grad inside one with grad: a reentrant checkpoint, whose gradients come from nested
        backward passes, perhaps several (or a no_grad helper, which loses only its overlap). Outside of a forward:
        the model is called by another method."""
        if self._lazy is not None and not torch.compiler.is_compiling():
            self._lazy.before_module(module)
        if torch.is_grad_enabled():
            if not self._in_forward and not torch.compiler.is_compiling() and not self._looked:
                self._notice_changes()
            return
        if not self._in_forward:
            return
        for owner in (module, *module.children()):
            for p in held(owner):
                if id(p) in self._by_id:
                    self._late.add(self._by_id[id(p)])

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            outputs = tensors_in(output)
            self._step_rows.begin(self._reading, outputs).hook(outputs, self._reached)

    def _leave_forward(self, *_: Any) -> None:
        """Also where it raised."""
        self.buffers.finish()
        self._in_forward = False
        if self._lazy is not None:
            self._lazy.access.inside = False

    def _before_state_dict(self, *_: Any) -> None:
        if not self._drain_between() and self._stale is not None:
            self._stale.warn_not_drained()
        self.buffers.copied()

    # --- backward ----------------------------------------------------------------------------------------------

    def _reached(self, forward: Forward) -> None:
        self._step_rows.reach(forward)
        self._open()

    def _open(self) -> None:
        if self._stale is not None and not self._accumulates:
            self._stale.look(self._by_id)
        if self._lazy is not None:
            self._lazy.opens(self._params)
        if self._task is None and self._sync:
            self._notice_changes()
            self._task = torch._C._current_graph_task_id()
            self._out.begin()
            Variable._execution_engine.queue_callback(self._end)

    def _after_grad(self, p: torch.Tensor) -> None:
        if self._stale is not None and not self._accumulates:
            self._accumulates = True
            self._stale.begin()
        index = self._by_id.get(id(p))
        if self._lazy is not None and index is not None:
            self._lazy.grows(p, self._infos[index].name)
        if not self._sync:
            return
        if self._task is None:
            if nested():
                self._leftover = True  # the outermost end is out of sight: left to the optimizer's step
                return
            self._open()
            index = self._by_id.get(id(p))
        if index is None:  # replaced since the forward pass
            return
        if index in self._out.final:
            raise PoseidonError(
                f"the gradient of {self._infos[index].name} was produced again after it was final (a parameter used "
                "inside and outside a reentrant checkpoint: pass use_reentrant=False)"
            )
        if index in self._late or torch._C._current_graph_task_id() != self._task:
            self._leftover = True
            return
        self._finalize(index)

    def _finalize(self, index: int) -> None:
        try:
            whole = self._out.finalize(index)
        except UserError as error:
            self._exchange.fail(error)
            raise
        if whole and self.options.overlap != "none" and not self._step_rows.waits():
            self._out.send(self.stepping.count, absent=self._absent)

    def _end(self) -> None:
        """End of the outermost backward pass."""
        task, self._task = self._task, None
        if self._out.final or self._leftover:
            self._close()
            return
        self._step_rows.unreach(task)

    def _concerned(self, optimizer: torch.optim.Optimizer) -> bool:
        known = any(optimizer is one for one in self._optimizers) or holds(optimizer, self._by_id)
        return known or holds(optimizer, self._agreed.ids())  # not seen in a forward pass yet

    def _begin_step(self, optimizer: torch.optim.Optimizer, closure: object) -> torch.optim.Optimizer | None:
        if closure is None and self.stepping.missed(optimizer, self._plan_changes):
            self._close()
        goes_on = None
        if self._stale is not None:
            self._accumulates = False
            goes_on = self._stale.before_step(optimizer, closure)
        elif self._lazy is not None:
            goes_on = self._lazy.before_step(optimizer, closure)
        self._step_rows.step_begins()
        return goes_on

    def _plan_changes(self) -> bool:
        plan = self.plan
        self._notice_changes()
        return self.plan is not plan

    def _close(self) -> None:
        """Send what has not left, wait for all results, write them to ``p.grad``; or, as far as updates wait for their
        parameters' next use, leave both to that."""
        plan, lazy, seen = self.plan, self._lazy, set(self._out.final)
        waits = lazy is None or lazy.waits(self._optimizers, self._params, plan.trial or self._absent)
        for index in range(len(self._params)):
            if index not in self._out.final:
                self._finalize(index)
        self._out.send(self.stepping.count, absent=self._absent)
        self.buffers.pause()
        warn, heard = self._step_rows.warner(), []
        if self._stale is not None:
            heard = [late.plan.syncers.rows_of(late.round) for late in self._stale.closed(plan, self.round)]
        elif waits:
            while plan.syncers.pending:
                self._write(plan, *self._take(plan))
            heard = [plan.syncers.rows_of(self.round)]
            if lazy is not None:
                lazy.waited(seen, self._params)
        elif lazy is not None:
            lazy.closed(plan, self.round, warn)
        for rows in heard:
            warn(self._exchange.rank, rows)
        self.round += 1
        plan.rounds += 1
        if plan.trial:
            self._decide()
        else:
            self.planned_rounds += 1
        self.buffers.round_closed()
        self._step_rows.round_closed()
        self._new_round()
        self.stepping.round_closed()

    def _take(self, plan: Plan) -> tuple[int, int, Any]:
        start = time.perf_counter()
        item = plan.syncers.take()
        if not plan.trial:
            self.stall_seconds += time.perf_counter() - start
        return item

    def _write(self, plan: Plan, round_: int, number: int, result: Any) -> None:
        """A unit's global gradient to ``p.grad``, or of a share what this rank is to make of it to the others."""
        unit = plan.book.units[number]
        if isinstance(result, Share):
            values = plan.gradients.multiply(unit, result.contributions, result.rows)
            plan.syncers.share(round_, number, result.rows, values)
        else:
            plan.gradients.apply(unit, result)

    def _decide(self) -> None:
        """After a round by PS: rank 0 chooses the schemes from everyone's factors; all adopt them."""
        first = self._exchange.rank == 0
        if first and whole_is_compiled(self._model):
            log.warning(
                "the whole model is compiled: its gradients become final together, after the backward pass, so "
                "that no communication hides under it; compile it block by block (block.compile()) instead"
            )
        mine = self.buffers.changed() if first else []
        basis, sizes = self._basis.observed(self._out.seconds), self._out.factor_sizes
        if basis.sparse is not False:
            sizes = self.plan.gradients.with_shares(sizes)
        decision, live = negotiate(self._exchange, self._index, basis, self._infos, sizes, mine)
        self.buffers.keep_alive(live)
        self._adopt(decision)

    def _adopt(self, decision: Decision) -> None:
        self.decision = decision
        self.plan.syncers.close()
        self._install(self.plan.version + 1, dict(decision.schemes))

    # --- weights that wait for their gradients ------------------------------------------------------------------

    def drain(self) -> None:
        """Apply all averages that this rank has stepped for, after waiting for them."""
        if self._stale is not None:
            self._stale.drain()
        if self._lazy is not None:
            self._lazy.drain()

    def _drain_between(self) -> bool:
        """The same, if weights may change now: not in the middle of an iteration.

        Returns:
            May they?
        """
        if self._stale is None:
            self.drain()
            return True
        middle = self._accumulates or not self._stale.between or self._step_rows.open()
        if not middle:
            self._stale.drain()
        return not middle

    # --- after this rank's last step ---------------------------------------------------------------------------

    def listen(self, bell: Callable[[], None] | None) -> None:
        """Call ``bell``, in the endpoint's thread, whenever another rank begins a round."""
        self.buffers.pause()
        self._bell = bell
        self.plan.syncers.listen(bell)

    def go_along(self, known: bool) -> bool:
        """Take part in the next round without rows, if another rank has begun it (or is ``known`` to have).

        Returns:
            False if none has.
        """
        step = self.plan.syncers.step_elsewhere(self.round)
        if step is None and not known:
            return False
        if step is not None:
            self.stepping.count = step
        self._absent, self._step_rows.explicit = True, 0
        for p in self._params:
            p.grad = None
        self._close()
        self.buffers.pause()
        self._absent = False
        for p in self._params:
            p.grad = None
        return True

    def take_over(self, source: int, steps: int) -> None:
        """Collective: everyone's parameters, buffers and optimizer state are those of rank ``source``."""
        exchange, index = self._exchange, self._index
        self.buffers.catch_up()
        state = [*self._model.parameters(), *self._model.buffers()]
        broadcast(exchange, index, self._next_tag(), state, "final state", source)
        self.buffers.synchronized()
        share_state(exchange, index, self._next_tag(), self._optimizers, source)
        self.stepping.taken_over(steps)

    # --- what a session offers ---------------------------------------------------------------------------------

    def rows_now(self) -> tuple[int | None, bool]:
        """n_r, and has the user said so? Else of the forward pass that runs, or ran last; None: unknown."""
        if self.options.rows == "equal":
            return 1, True
        explicit = self._step_rows.explicit
        if explicit is not None:
            return explicit, True
        return (self._reading.rows if self._reading is not None and self._reading.certain else None), False

    def rows(self, n: int) -> None:
        self._step_rows.explicit = n

    def set_sync(self, sync: bool) -> None:
        """False inside no_sync(): gradients accumulate locally."""
        self._sync = sync
        for record in self._records.values():
            record.paused = not sync

    def sync_buffers(self) -> None:
        """Collective: rank 0's buffers (batch-norm statistics) everywhere."""
        self.buffers.catch_up()
        broadcast(self._exchange, self._index, self._next_tag(), list(self._model.buffers()), "buffers")
        self.buffers.synchronized()

    def _next_tag(self) -> int:
        self._broadcasts += 1
        return TAG_TENSORS + self._broadcasts - 1

    def undo(self) -> None:
        """Take all hooks off; the model is plain again."""
        self.stepping.unwatch()
        for waiting in (self._stale, self._lazy):
            if waiting is not None:
                waiting.close()
        self._unhook()

    def _unhook(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.plan.syncers.close()
