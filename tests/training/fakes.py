"""Sessions without sockets: ranks are threads, gradients are averaged by plain sums. The loop's oracle."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from poseidon.api.replicas import compare_replicas
from poseidon.engine.device import Host
from poseidon.planning import Topology


class World:
    """``size`` ranks that meet in :meth:`exchange`."""

    def __init__(self, size: int = 1, *, plain_mean: bool = False) -> None:
        self.size = size
        self.plain_mean = plain_mean  # as PyTorch's DDP: all ranks weigh the same, none may stay away
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def sessions(self) -> list[FakeSession]:
        return [FakeSession(self, rank) for rank in range(self.size)]

    def run(self, work: Callable[[FakeSession], Any]) -> list[Any]:
        """``work(session)`` on all ranks at once; the first failure is raised here."""
        results: list[Any] = [None] * self.size
        failures: list[BaseException] = []

        def body(session: FakeSession) -> None:
            try:
                results[session.rank] = work(session)
            except BaseException as error:
                failures.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(session,)) for session in self.sessions()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        if failures:
            raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
        return results


class FakeSession:
    """What the loop uses of :class:`poseidon.Session`; counts what it is asked for."""

    def __init__(self, world: World | None = None, rank: int = 0) -> None:
        self.world = world or World()
        self.rank, self.world_size, self.local_rank = rank, self.world.size, rank
        self.topology = Topology.flat(self.world_size)
        self.device = torch.device("cpu")
        self.accelerator = Host()
        self.gathers = 0
        self.deferred = 0  # micro-batches within no_sync
        self.row_counts: list[int] = []
        self.bytes = 0

    def distribute(self, model: Any, optimizer: Any, comm: str = "hybrid", **options: Any) -> Any:
        parameters = [p for p in model.parameters() if p.requires_grad]

        def average(*_: Any) -> None:
            rows = self.row_counts[-1]
            mine = [None if p.grad is None else p.grad.clone() for p in parameters]
            everyone = self.world.exchange(self.rank, (rows, mine))
            if self.world.plain_mean:
                assert all(g is not None for _, grads in everyone for g in grads)
                everyone = [(1, grads) for _, grads in everyone]
            total = sum(n for n, _ in everyone)
            for i, p in enumerate(parameters):
                grads = [g[i] * (n / total) for n, g in everyone if n and g[i] is not None]
                p.grad = sum(grads) if grads else None
            self.bytes += 1000

        if self.world_size > 1:
            optimizer.register_step_pre_hook(average)
        return model

    def rows(self, n: int) -> None:
        self.row_counts.append(n)

    @contextmanager
    def no_sync(self) -> Any:
        self.deferred += 1
        yield

    def drain(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def barrier(self) -> None:
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        self.gathers += 1
        return self.world.exchange(self.rank, value)

    def check(self, model: Any) -> None:
        compare_replicas(self.gather, model)

    def digest(self, model: Any) -> str:
        found = hashlib.sha256()
        for tensor in model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    def report(self, model: Any) -> dict[str, Any]:
        return {
            "schemes": {"layer": "ps"},
            "plan": [{"layer": "layer", "scheme": "ps"}],
            "bytes_sent_per_iteration": 1000.0,
            "bytes_dense_per_iteration": 1000.0,
            "bytes_planned_per_iteration": 990.0,
            "bytes_inside_per_iteration": 0.0,
            "bytes_inside_planned_per_iteration": 0.0,
            "from_servers": [],
            "bytes_source": "counted",
            "traffic": {},
            "stall_seconds": 0.0,
            "rates": None,
            "most_bytes_queued": 10 * self.rank,
            "most_bytes_in_flight": 20,
            "strangers": {"frames": self.rank, "connections": 1},
        }

    def stall_seconds(self, model: Any) -> float:
        return 0.0

    def bytes_sent(self, model: Any) -> int:
        return self.bytes

    def close(self) -> None:
        pass
