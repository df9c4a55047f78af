""":class:`Session`: what a user's own training script has in hand."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from poseidon.api import rendezvous
from poseidon.api.batchnorm import SyncBatchNorm, weigh
from poseidon.api.ddp import DDP
from poseidon.api.env import JobEnv
from poseidon.api.replicas import compare_replicas
from poseidon.engine import (
    CudaCopies,
    Downpour,
    Engine,
    Exchange,
    Host,
    Options,
    Reference,
    Staged,
    digest,
    join,
    report,
    traced,
    uncounted,
)
from poseidon.engine import Device as Accelerator
from poseidon.engine.start import agree, manifest
from poseidon.engine.steps import warn_of_strangers
from poseidon.errors import PoseidonError, UserError
from poseidon.planning import FactorSize, Timing, Topology
from poseidon.tracing import Tracer
from poseidon.transport import MAX_PAYLOAD, Endpoint, Owner

Comm = Literal["single", "ps", "sfb", "hybrid", "block", "project_adam", "downpour", "ddp", "fsdp"]
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")
COMMS = get_args(Comm)


@dataclass
class _Distributed:
    """A model of this session, and what synchronises it: an engine, another in its place, or nothing (one rank)."""

    model: nn.Module
    comm: str
    index: int
    sync: Engine | Reference | None


class Session:
    """This process's place in a data-parallel job.

    Attributes:
        rank, world_size, local_rank: as torchrun counts them.
        device: where this rank's model belongs (``cuda:local_rank`` or ``cpu``).
        topology: which ranks are the devices of one node, and which serve.
        accelerator: what computes gradients: this host, or the device with its own memory; emulation puts its own here
            before ``distribute``.
        tracer: records what is done for the models that are distributed from then on; None: nothing does.
    """

    def __init__(
        self,
        job: JobEnv,
        device: torch.device,
        *,
        store: Any = None,
        endpoint: Endpoint | None = None,
        timeout: float,
        topology: Topology | None = None,
    ) -> None:
        self.rank, self.world_size, self.local_rank = job.rank, job.world_size, job.local_rank
        self.device = device
        self.timeout = timeout
        self.accelerator: Accelerator = Host()
        self.tracer: Tracer | None = None
        self._job = job
        self._store = store
        self.topology = topology or Topology.flat(job.world_size)
        self._exchange = Exchange(endpoint, timeout, self.topology) if endpoint is not None else None
        self._staged: Staged | None = None
        if self._exchange is not None and device.type == "cuda":
            self.accelerator = self._staged = Staged(CudaCopies(device), self._exchange.broken)
        if self._exchange is not None and store is not None:
            self._exchange.elsewhere = self._elsewhere
        self._models: list[_Distributed] = []
        self._distributed_so_far = 0
        self._gathers = 0
        self._met: set[int] = set()  # optimizers that have stepped
        self._closed = False
        self._owner = Owner()
        self._owns_process_group = False

    # --- distributing ------------------------------------------------------------------------------------------

    def distribute(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        comm: Comm = "hybrid",
        *,
        overlap: Literal["none", "backward", "full"] = "backward",
        rule: Literal["paper", "time"] = "time",
        plan: str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any] | None = None,
        rows: Literal["leading", "equal"] = "leading",
        kv_bytes: int = 2 * 1024 * 1024,
        merge_bytes: int = 64 * 1024,
        staleness: int = 0,
        staleness_mode: Literal["newest", "fixed"] = "newest",
        sparse: Literal["auto", "always", "never"] = "auto",
        bucket_cap_mb: float = 25.0,
        sizes: Mapping[str, FactorSize] | None = None,
        timing: Timing | None = None,
    ) -> nn.Module:
        """Make a plain model and its optimizer (or several) data-parallel, in place. Collective.

        Afterwards every rank has rank 0's parameters and buffers, and ``loss.backward()`` leaves the global gradient in
        ``p.grad``: the average over all rows of all ranks, sum over r of (n_r / N) g_r (under "downpour" the rank's
        own). At world size 1 no hook is installed.

        Args:
            comm: ``hybrid``: per layer, as `rule` says, one of the next three; ``ps``: sharded parameter server;
                ``sfb``: sufficient factors of Linear layers to all, the rest by ps; ``block``: a Linear layer's factors
                to the owners of blocks of its matrix, the multiplied blocks back to all; ``project_adam``: a baseline
                of the papers, the same with one owner of the whole matrix; ``downpour``: another one, asynchronous, see
                :mod:`poseidon.engine.downpour`; ``ddp``: PyTorch's own; ``fsdp``: PyTorch's too, parameters and
                optimizer sharded; ``single``: world size 1.
            overlap: ``backward``: a layer's gradient leaves while the layers below still compute; ``none``: all
                communication after the backward pass; ``full``: as ``backward``, but nothing is waited for before the
                next forward pass comes to a layer, or somebody looks at it through its module. The same bits;
                references to parameters kept elsewhere need :meth:`synchronize` first (docs/overlap.md).
            rule: how hybrid chooses, from the rows that iteration 0 really had: ``time``: of ps, sfb and block what is
                predicted to take least, from rates of processors and links that are measured now, in about a second,
                and the layers' seconds in iteration 0; ``paper``, as ``time`` does where nothing is clearly better,
                where layers are few and small, and on GPUs: of ps and sfb what moves fewer floats (P17, algorithm 1).
            plan: of hybrid, one to go by again, instead of `rule`: the path of a run's plan.json or of what `poseidon
                plan plan.format=json` wrote, or what such a file holds; rank 0's counts. Makes runs with ``time``
                reproducible bit for bit.
            rows: n_r: ``leading``: as the model's input shows, the first dimension of the first tensor in it (or the
                length of a list); ``equal``: all ranks weigh the same, as in DDP. See also :meth:`rows`.
            kv_bytes: largest KV pair and message, in bytes.
            merge_bytes: parameters smaller than this share a message (fsdp: modules of this to 16 x this are units).
            staleness: s of SSP(s), of our own comms: a rank computes with averages that may be as many iterations old,
                rather than wait (docs/staleness.md). 0: none is. `optimizer` must then be one, which steps once per
                averaged backward pass.
            staleness_mode: ``newest``: what is complete is applied; ``fixed``: averages are applied as late as
                `staleness` allows, which makes runs reproducible.
            sparse: whether factors, which ReLU and dropout make sparse, are sent as bits and non-zeros where that is
                smaller (docs/wire.md); exact either way. ``auto``: of the layers that it is predicted to pay for, from
                what iteration 0 shows and rates of links and processors that are measured now.
            bucket_cap_mb: ddp only: bucket size in MiB.
            sizes: of the factors that iteration 0 would tell, by name of the weight, equal on all ranks; without them
                iteration 0 goes by PS and tells.
            timing: what ``rule="time"`` and ``sparse="auto"`` would measure, equal on all ranks.

        Returns:
            `model` itself.

        Raises:
            UserError: a bad argument; a plan that is none for this model on these nodes; ranks whose models differ
                (every rank names the same first difference).
        """
        self._check_open()
        one_of("comm", comm, COMMS)
        one_of("overlap", overlap, ("none", "backward", "full"))
        one_of("rule", rule, ("paper", "time"))
        one_of("rows", rows, ("leading", "equal"))
        if not 1024 <= kv_bytes <= MAX_PAYLOAD:
            raise UserError(f"kv_bytes={kv_bytes} must lie between 1024 and {MAX_PAYLOAD}")
        if merge_bytes < 0:
            raise UserError(f"merge_bytes={merge_bytes} must not be negative")
        one_of("sparse", sparse, ("auto", "always", "never"))
        one_of("staleness_mode", staleness_mode, ("newest", "fixed"))
        if staleness < 0:
            raise UserError(f"staleness={staleness} must not be negative")
        if staleness and comm in ("single", "ddp", "fsdp", "downpour"):
            raise UserError(f"staleness={staleness}: comm={comm!r} has none; take ps, sfb or hybrid, or leave it at 0")
        if comm == "single" and self.world_size > 1:
            raise UserError(f"comm='single' is one process without an engine, but this job has {self.world_size} ranks")
        if plan is not None and comm != "hybrid":
            raise UserError(f"plan= replays what comm='hybrid' chose; with comm={comm!r} leave it out")
        if any(entry.model is model for entry in self._models):
            raise UserError("this model is distributed already: call session.undistribute(model) first")
        _refuse_wrapped(model)
        if comm == "downpour" and any(isinstance(module, SyncBatchNorm) for module in model.modules()):
            raise UserError(
                "comm='downpour' lets ranks run apart, which synchronised batch-norm cannot: leave sync_batchnorm() out"
            )
        optimizers = _optimizers(optimizer)
        index = self._distributed_so_far
        self._distributed_so_far += 1
        sync: Engine | Reference | None = None
        if self._exchange is not None:
            self._exchange.tracer = self.tracer
        if comm == "ddp" and self.world_size > 1:
            sync = DDP(model, self.world_size, bucket_cap_mb, self.accelerator, self.tracer)
        elif comm == "fsdp" and self._exchange is not None:
            about = manifest(model, {"comm": comm, "merge_bytes": merge_bytes}, optimizers)
            agree(self._exchange, index, about, self.device)
            try:
                from poseidon.api.fsdp.model import FSDP
            except ImportError as error:  # of PyTorch's hooks for other collectives, which are young
                raise PoseidonError(f"comm='fsdp' does not know torch {torch.__version__}: {error}") from error
            sync = FSDP(model, optimizers, self.device, merge_bytes, self.accelerator, self.tracer)
        elif self._exchange is not None:
            options = Options(
                comm, overlap, rows, kv_bytes, merge_bytes, staleness, staleness_mode, rule, plan is not None, sparse
            )
            device, here = traced(self._accelerator_of(model), self.tracer), self._job.local_world_size
            if comm == "downpour":
                sync = Downpour(model, optimizers, self._exchange, index, options, device)
                sync.meet = self._meet
            else:
                recorded = os.fspath(plan) if isinstance(plan, os.PathLike) else plan
                sync = Engine(model, optimizers, self._exchange, index, options, device, here, sizes, timing, recorded)
                sync.stepping.meet = self._meet
        if sync is not None:
            weigh(model, sync.rows_now if isinstance(sync, Engine) else lambda: (1, True))
        self._models.append(_Distributed(model, comm, index, sync))
        return model

    def _accelerator_of(self, model: nn.Module) -> Accelerator:
        """A model that was left on the CPU is trained there, also where the session has a GPU."""
        if self.accelerator is self._staged and all(p.is_cpu for p in model.parameters()):
            return Host()
        return self.accelerator

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step; at an optimizer's first one, all models that it is for are known."""
        if self.rank == 0 and id(optimizer) not in self._met:
            self._met.add(id(optimizer))
            warn_of_strangers(optimizer, [entry.model for entry in self._models])

    def undistribute(self, model: nn.Module) -> None:
        """Take every hook off `model`: it is plain again. Under comm="fsdp" and "downpour" collective."""
        entry = self._entry(model)
        if isinstance(entry.sync, Engine):
            entry.sync.drain()
            entry.sync.buffers.fetch()
            entry.sync.buffers.leave()
        if entry.sync is not None:
            weigh(model, None)
            entry.sync.undo()
        self._models.remove(entry)

    def rows(self, n: int) -> None:
        """Say how many rows the next step's loss is a mean over on this rank, over all its micro-batches.

        0 means: nothing from this rank; then backward may be left out, ``optimizer.step()`` may not.
        """
        if n < 0:
            raise UserError(f"session.rows({n}): must not be negative")
        for entry in self._models:
            if entry.sync is not None:
                entry.sync.rows(n)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates locally (micro-batches before the last of a step)."""
        with contextlib.ExitStack() as stack:
            for entry in self._models:
                if isinstance(entry.sync, Reference):
                    stack.enter_context(entry.sync.no_sync())
            for engine in self._engines():
                engine.set_sync(False)
                stack.callback(engine.set_sync, True)
            yield

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a training loop in which ranks make different numbers of steps (uneven shares of the data).

        A rank that leaves the block goes along with the others' synchronisations, with no rows of its own, until all
        have left it: their averages are over the ranks that still train. Then all have the weights, buffers and
        optimizer state of the rank that made most steps. No other collective call may stand inside the block.

        Raises:
            UserError: a model goes by comm="ddp" (PyTorch has ``torch.distributed.algorithms.Join`` for it), "fsdp" or
                "downpour" (where ranks may make as many steps as they like), has synchronised batch-norm, or trains
                with staleness.
        """
        for entry in self._models:
            if isinstance(entry.sync, Reference):
                raise UserError(
                    "session.join() is neither for PyTorch's own nor for downpour; a model of this session goes by "
                    f"comm={entry.comm!r}: take ps, sfb or hybrid, or leave join() out"
                )
        if any(isinstance(m, SyncBatchNorm) for entry in self._models for m in entry.model.modules()):
            raise UserError(
                "session.join() cannot go along with synchronised batch-norm: a rank that has left the loop calls no "
                "layers; give all ranks the same number of steps"
            )
        if any(engine.options.staleness for engine in self._engines()):
            raise UserError(
                "session.join() is not for models that train with staleness: leave join() out and give all ranks the "
                "same number of steps, or take staleness=0"
            )
        yield
        if self._exchange is not None:
            join(self._exchange, self._engines())

    def drain(self) -> None:
        """With staleness: apply all averages of this rank's steps so far, after waiting for them.

        Ranks that have made as many steps then have the same weights. Done by itself before state_dict(), a forward
        pass in eval mode without grad, synchronize(), check(), digest(), undistribute() and close().

        Raises:
            PoseidonError: a rank was lost or silent.
        """
        self._check_open()
        for engine in self._engines():
            engine.drain()

    def synchronize(self) -> None:
        """Collective: every rank takes rank 0's buffers (batch-norm statistics).

        Call it before evaluating, saving or comparing. Parameters are the same everywhere anyway, but with staleness,
        where some averages may not be applied yet, under "fsdp", where each rank has a part, and under "downpour",
        where they differ (call it at the end, too): then all ranks have whole, equal ones and the optimizer's whole
        state until the next optimizer step.
        """
        self._check_open()
        for entry in self._models:
            if not self.accelerator.has_values and not isinstance(entry.sync, Downpour):
                continue  # there is nothing to take; pushes are to be waited for all the same
            if isinstance(entry.sync, Engine):
                entry.sync.drain()
                entry.sync.sync_buffers()
            elif entry.sync is not None:
                entry.sync.synchronize(entry.model)

    # --- control traffic ---------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able `value`, in rank order, on every rank. Collective; not for the hot path.

        Raises:
            PoseidonError: a rank was lost or silent for the session's timeout; names it.
        """
        self._check_open()
        if self.world_size == 1:
            return [value]
        self._gathers += 1
        for engine in self._engines():
            engine.buffers.pause()  # another rank may want them before it comes here
        check = {} if self._exchange is None else {"check": self._exchange.check_for}
        mine = [value, [[engine.round, engine.stepping.count] for engine in self._engines()]]
        everyone = rendezvous.gather(self._store, self._job, self._gathers, mine, self.timeout, **check)
        return [theirs for theirs, _ in everyone]

    def _elsewhere(self, rank: int) -> str | None:
        """While this rank waits for gradients: `rank` has entered a gather() that this one has not, and contributes
        nothing before all are there."""
        with contextlib.suppress(dist.DistError):
            theirs = rendezvous.peek(self._store, self._gathers + 1, rank)
            for engine, (closed, steps) in zip(self._engines(), theirs[1] if theirs else (), strict=False):
                if engine.awaits is not None and closed <= engine.awaits:
                    return (
                        f"is in session.gather() (a barrier, an evaluation ...) after {steps} optimizer steps, rank "
                        f"{self.rank} is at step {engine.stepping.count + 1}: every rank must make the same number of "
                        f"backward passes and steps (or leave by session.join())"
                    )
        return None

    def barrier(self) -> None:
        self.gather(None)

    def check(self, model: nn.Module) -> None:
        """Collective: compares all ranks' parameters and buffers, bit for bit. Call it now and then, off the hot path.

        Raises:
            ReplicaMismatchError: on every rank, naming the first tensor that differs.
        """
        with contextlib.ExitStack() as stack:
            for entry in self._models:
                if entry.model is model and isinstance(entry.sync, Engine):
                    entry.sync.drain()
                elif entry.model is model and isinstance(entry.sync, Reference):
                    entry.sync.sync_buffers(model)  # DDP would do so before the next forward pass
                    stack.enter_context(entry.sync.whole())
            compare_replicas(self.gather, model, distributed=any(entry.model is model for entry in self._models))

    # --- figures -----------------------------------------------------------------------------------------------

    def digest(self, model: nn.Module) -> str:
        """sha256 of this rank's parameters and of rank 0's buffers: equal on all ranks between the same steps.

        Under comm="fsdp" and "downpour" collective, and of this rank's buffers.
        """
        with contextlib.ExitStack() as stack:
            for entry in self._models:
                if entry.model is model and isinstance(entry.sync, Engine):
                    self._check_open()
                    entry.sync.drain()
                    entry.sync.buffers.fetch()
                elif entry.model is model and isinstance(entry.sync, Reference):
                    stack.enter_context(entry.sync.whole())
            return digest([*model.named_parameters(), *model.named_buffers()])

    def report(self, model: nn.Module) -> dict[str, Any]:
        """This rank's plan, schemes, bytes and stall time as plain data."""
        entry = self._entry(model)
        if isinstance(entry.sync, (Engine, Downpour)) and self._exchange is not None:
            return report(entry.sync, self._exchange, entry.index)
        sent, scheme = (entry.sync.bytes, entry.comm) if isinstance(entry.sync, Reference) else (0.0, "none")
        return uncounted(model, scheme, sent)

    def stall_seconds(self, model: nn.Module) -> float:
        """Seconds the training thread has waited for communication so far (an engine's iteration 0 left out)."""
        sync = self._entry(model).sync
        return sync.stall_seconds if sync is not None else 0.0

    def bytes_sent(self, model: nn.Module) -> int:
        """Bytes this rank has sent to other nodes so far, headers included, for all models."""
        sent = dict(self._exchange.endpoint.counters.sent) if self._exchange is not None else {}
        return sum(count for peer, count in sent.items() if peer not in self.topology.beside(self.rank))

    # --- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the job: apply what waits to be applied, say goodbye to the peers, take the hooks off. Idempotent."""
        try:
            failed = self._exchange is not None and self._exchange.failure is not None
            if not self._closed and not failed and self._owner.here():
                for engine in self._engines():
                    engine.drain()
        finally:
            self.leave()

    def leave(self) -> None:
        """The same, but what waits to be applied is dropped; also runs at exit, and where an error ends the session."""
        if self._closed or not self._owner.here():
            return
        self._closed = True
        for engine in self._engines():
            engine.buffers.leave()
        for entry in self._models:
            weigh(entry.model, None)
            if isinstance(entry.sync, Reference):
                entry.sync.close()
            elif entry.sync is not None:
                entry.sync.undo()
        self._models.clear()
        if self._exchange is not None:
            self._exchange.close()
        if self._staged is not None:
            self._staged.close()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.leave()

    def _engines(self) -> list[Engine]:
        return [entry.sync for entry in self._models if isinstance(entry.sync, Engine)]

    def _entry(self, model: nn.Module) -> _Distributed:
        self._check_open()
        for entry in self._models:
            if entry.model is model:
                return entry
        raise UserError("this model was not distributed in this session: call session.distribute(model, optimizer)")

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this session is closed")
        if not self._owner.here():
            raise UserError("this session belongs to the process that this one was forked from")


def _refuse_wrapped(model: nn.Module) -> None:
    """PyTorch's own wrappers average, too, and hide what the engine looks for."""
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__module__.startswith(_WRAPPERS):
                raise UserError(
                    f"{f'layer {name}' if name else 'the model'} is made data-parallel by PyTorch's {base.__name__} "
                    "already: give distribute() the plain model (of a wrapper: wrapper.module)"
                )


def _optimizers(given: object) -> list[torch.optim.Optimizer]:
    several: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            raise UserError(f"optimizer is a {type(each).__name__}, must be a torch.optim.Optimizer or a list of them")
    return several


def one_of(name: str, value: object, accepted: tuple[str, ...]) -> None:
    """Raises UserError if `value` is none of those that are `accepted`."""
    if value not in accepted:
        raise UserError(f"{name}={value!r} is not one of {', '.join(accepted)}")
