"""Ranks as threads of one process: sessions over the in-process transport."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from poseidon.api import Session
from poseidon.api.env import JobEnv
from poseidon.engine import Exchange, Host, Staged
from poseidon.engine.server import serve
from poseidon.planning import Topology
from poseidon.transport import Endpoint, InprocEndpoint, inproc_mesh
from tests.copies import LateCopies, NoCopies

LIMIT_SECONDS = 60.0


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
    """torch's activation checkpoint, for ranks as threads: without the state of random numbers. Two threads that read
    and write it can lock each other out for good: one has the generator and needs the interpreter, the other has that.
    """
    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-untyped-call]
        function, *args, use_reentrant=use_reentrant, preserve_rng_state=False
    )


@contextlib.contextmanager
def staged(session: Session, copies: LateCopies | NoCopies) -> Iterator[None]:
    """Inside, the session's gradients are made on a device whose memory is copied so."""
    assert session._exchange is not None
    session.accelerator = device = Staged(copies, session._exchange.broken)
    device.has_values = copies.where.type != "meta"
    try:
        yield
        session.close()
    finally:
        device.close()
        copies.close()


def run_ranks(
    world_size: int,
    body: Callable[[Session], Any],
    *,
    kind: type[InprocEndpoint] = InprocEndpoint,
    wrap: Callable[[InprocEndpoint], Endpoint] = lambda endpoint: endpoint,
    timeout: float = 20.0,
    limit: float = LIMIT_SECONDS,
    devices: Sequence[int] = (),
    servers: int | Sequence[int] | None = None,
    copies: Callable[[], LateCopies | NoCopies] | None = None,
) -> list[Any]:
    """Run `body(session)` on every rank at once; its results by rank. The first rank's exception is raised.

    `devices`: ranks per node, of all nodes; each is a node of its own without. `servers`: as in `Topology.of`.

    `copies`: makes each rank's, of a device with memory of its own; without, gradients are made on the host.

    `wrap` may put something around each rank's endpoint (faults).

    Exceptions come back as results if `body` returns them. All ranks' stacks are dumped at the time limit.
    """
    topology = Topology.of(devices or [1] * world_size, servers)
    extra = servers if isinstance(servers, int) else 0
    endpoints = inproc_mesh(world_size + extra, kind)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * (world_size + extra)

    def target(rank: int) -> None:
        job = JobEnv(rank, world_size, rank, world_size)
        endpoint = wrap(endpoints[rank])
        session = Session(job, torch.device("cpu"), endpoint=endpoint, timeout=timeout, topology=topology)
        try:
            with contextlib.ExitStack() as stack:
                if copies is not None:
                    stack.enter_context(staged(session, copies()))
                results[rank] = body(session)
        except BaseException as error:
            errors[rank] = error
        finally:
            session.close()

    def serving(rank: int) -> None:
        exchange = Exchange(wrap(endpoints[rank]), timeout, topology)
        try:
            serve(exchange, Host())
        except BaseException as error:
            errors[rank] = error
        finally:
            exchange.close()

    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(world_size)]
    threads += [threading.Thread(target=serving, args=(world_size + i,), daemon=True) for i in range(extra)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        raise TimeoutError(f"ranks still run after {limit} s")
    for error in errors:
        if error is not None:
            raise error
    return results
