"""comm=downpour: what servers make of pushes, what workers wait for, and what all have afterwards."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import poseidon
from poseidon.api import Session
from poseidon.engine.downpour import _check_topology
from poseidon.engine.pushes import UNANSWERED
from poseidon.engine.slices import ELEMENTWISE
from poseidon.errors import PeerLostError, UserError
from poseidon.planning import Topology
from poseidon.transport import Kind
from poseidon.transport.faults import Fault, FaultyEndpoint
from tests.engine.nets import batch, build, clone, share
from tests.ranks import LIMIT_SECONDS, run_ranks

#: Large parameters are split among servers, small ones merged; of the merged units some are cut as well.
CUT: dict[str, Any] = {"comm": "downpour", "kv_bytes": 2048, "merge_bytes": 4096}


def recorded(model: nn.Module, steps: int, seed: int = 0, missing: float = 0.2) -> list[list[torch.Tensor | None]]:
    """By step, a gradient of each parameter, or none."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            None if float(torch.rand((), generator=generator)) < missing else torch.randn(p.shape, generator=generator)
            for p in model.parameters()
        ]
        for _ in range(steps)
    ]


def replay(
    model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[list[torch.Tensor | None]], schedule: Any = None
) -> None:
    for step in grads:
        for p, grad in zip(model.parameters(), step, strict=True):
            p.grad = None if grad is None else grad.clone()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def halved(grads: list[list[torch.Tensor | None]]) -> list[list[torch.Tensor | None]]:
    return [[None if grad is None else grad / 2 for grad in step] for step in grads]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.2},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
}


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_who_pushes_alone_trains_as_one_process(kind: str) -> None:
    """Of two workers the other has nothing: the optimizer on g / 2, slices put together again, its state included."""
    base, options = build("lenet"), {"lr": 0.01, "weight_decay": 0.0} | OPTIONS.get(kind, {})
    if kind == "Rprop":
        del options["weight_decay"]
    grads = recorded(base, 5)

    def optimize(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups = [{"params": rest}, {"params": first, "lr": 0.02}]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **options)
        return optimizer

    reference = copy.deepcopy(base)
    wanted = optimize(reference)
    for group in wanted.param_groups:
        group["weight_decay"] = group.get("weight_decay", 0.0) / 2
    replay(reference, wanted, halved(grads))

    def body(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = clone(base, session.rank)
        optimizer = optimize(model)
        session.distribute(model, optimizer, **CUT)
        if session.rank == 0:
            replay(model, optimizer, grads[:3])
        session.undistribute(model)
        session.distribute(model, optimizer, **CUT)  # goes on with the state that it has
        if session.rank == 1:
            replay(model, optimizer, grads[3:])
        session.synchronize()
        return model, optimizer

    for model, optimizer in run_ranks(2, body):
        assert_same(model, reference)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            state, want = optimizer.state[p], wanted.state[q]
            assert state.keys() == want.keys()
            for key in want:
                assert torch.equal(state[key], want[key]), key
                assert state[key].shape == want[key].shape
        assert len(optimizer.state_dict()["state"]) == len(wanted.state)


def test_sgd_adds_up_all_pushes() -> None:
    """Whatever their order: start - lr / P * (all gradients)."""
    base = build("mlp")
    grads = [recorded(base, 6, seed=rank, missing=0.3) for rank in range(3)]

    def body(session: Session) -> nn.Module:
        model = clone(base, session.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, **CUT)
        replay(model, optimizer, grads[session.rank])
        session.synchronize()
        return model

    for model in run_ranks(3, body):
        for index, (p, start) in enumerate(zip(model.parameters(), base.parameters(), strict=True)):
            pushed = [g for rank in grads for step in rank if (g := step[index]) is not None]
            torch.testing.assert_close(p, start - 0.1 / 3 * torch.stack(pushed).sum(0), rtol=1e-5, atol=1e-5)


def test_weights_decay_as_much_as_by_one_step() -> None:
    def body(session: Session) -> nn.Module:
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
        session.distribute(model, optimizer, comm="downpour")
        replay(model, optimizer, [[torch.zeros(4, 4), None]])
        session.synchronize()
        return model

    for model in run_ranks(2, body):
        torch.testing.assert_close(model.weight, torch.full((4, 4), (1 - 0.5 * 0.1 / 2) ** 2))


def test_two_workers_find_the_minimum() -> None:
    """Of a convex function, each from its half of the data."""
    generator = torch.Generator().manual_seed(1)
    x, truth = torch.randn(64, 8, generator=generator), torch.randn(8, 1, generator=generator)
    y = x @ truth

    def body(session: Session) -> float:
        model = nn.Linear(8, 1)
        # Gradients are up to four pushes old: lr / P times the largest curvature must stay below a third.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.distribute(model, optimizer, comm="downpour")
        mine, target = share((x, y), session.rank, [32, 32])
        for _ in range(300):
            optimizer.zero_grad()
            functional.mse_loss(model(mine), target).backward()
            optimizer.step()
            assert model.weight.grad is None
        session.synchronize()
        return float(functional.mse_loss(model(x), y).detach())

    assert max(run_ranks(2, body)) < 1e-4


def train(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        x, y = share(batch(number, 16), session.rank, [8] * session.world_size)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("servers", [None, [1]], ids=str)
def test_synchronized_replicas_are_alike_bit_for_bit(servers: list[int] | None) -> None:
    """Buffers too, and optimizer state; each rank has made another number of steps. What is sent is what is planned."""
    base = build("batchnorm")

    def body(session: Session) -> tuple[Any, ...]:
        model = clone(base, session.rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        session.distribute(model, optimizer, **CUT)
        train(session, model, optimizer, 6)
        session.synchronize()
        digest, report = session.digest(model), session.report(model)
        session.synchronize()  # nobody has gone on before all have their report
        train(session, model, optimizer, 1 + session.rank)
        return digest, report, session.digest(model), model.state_dict(), optimizer.state_dict()["state"]

    first, second = run_ranks(2, body, servers=servers)
    assert first[0] == second[0] != first[2]
    sent = [rank[1]["bytes_dense_per_iteration"] for rank in (first, second)]
    assert sent == [rank[1]["bytes_planned_per_iteration"] for rank in (first, second)]
    assert sum(sent) == 2 * 4 * (sum(p.numel() for p in base.parameters()) + len(flags(first[1])))
    assert first[1]["bytes_source"] == "counted"
    for name, value in first[3].items():
        assert torch.equal(value, second[3][name]) or "running" in name or "tracked" in name
    for number, state in first[4].items():
        assert all(torch.equal(value, second[4][number][key]) for key, value in state.items())


def flags(report: dict[str, Any]) -> list[Any]:
    """A merged unit has one for each of its parameters, which a PS sends too."""
    return [row for row in report["plan"] if row["merged"]]


def test_servers_step_with_what_a_schedule_says() -> None:
    base = build("mlp")
    grads = recorded(base, 6, missing=0)

    def step_lr(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    reference = copy.deepcopy(base)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.9)
    replay(reference, optimizer, halved(grads), step_lr(optimizer))

    def body(session: Session) -> nn.Module:
        model = clone(base, session.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        session.distribute(model, optimizer, **CUT)
        if session.rank == 1:
            replay(model, optimizer, grads, step_lr(optimizer))
        session.synchronize()
        return model

    for model in run_ranks(2, body):
        assert_same(model, reference)


def test_memory_in_another_order_sparse_gradients_and_several_optimizers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last))
            self.holes = nn.Parameter(torch.randn(20, 6)[:, ::2])
            self.table = nn.Embedding(30, 5, sparse=True)
            self.number = nn.Parameter(torch.tensor(0.5))
            self.idle = nn.Parameter(torch.ones(3), requires_grad=False)

    torch.manual_seed(0)
    base = Odd()
    grads = recorded(base, 3, missing=0)
    for step in grads:
        step[0] = step[0].to(memory_format=torch.contiguous_format)  # type: ignore[union-attr]
        step[4] = None

    def optimize(model: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([model.last, model.number], lr=0.1, momentum=0.9),
            torch.optim.Adam([model.holes, model.table.weight], lr=0.1),
        ]

    def run(model: Any, optimizers: list[torch.optim.Optimizer], sparse: bool, half: bool) -> None:
        for step in halved(grads) if half else grads:
            for p, grad in zip(model.parameters(), step, strict=True):
                p.grad = grad if grad is None or not (sparse and p is model.table.weight) else grad.to_sparse(1)
            for optimizer in optimizers:
                optimizer.step()

    reference = copy.deepcopy(base)
    wanted = optimize(reference)
    run(reference, wanted, False, True)

    def body(session: Session) -> tuple[Any, ...]:
        model = copy.deepcopy(base)
        optimizers = optimize(model)
        session.distribute(model, optimizers, **{**CUT, "kv_bytes": 1024})
        if session.rank == 0:
            run(model, optimizers, True, False)
        session.synchronize()
        return model, optimizers[0].state[model.last]["momentum_buffer"], session.report(model)["iterations"]

    for (model, momentum, iterations), steps in zip(run_ranks(2, body), (3, 0), strict=True):
        assert_same(model, reference)
        assert torch.equal(momentum, wanted[0].state[reference.last]["momentum_buffer"])
        assert momentum.stride() == reference.last.stride()
        assert iterations == steps


def test_who_has_no_rows_pushes_nothing() -> None:
    base = build("mlp")

    def body(session: Session) -> tuple[bool, float]:
        model = clone(base, session.rank)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])]  # type: ignore[index]
        session.distribute(model, optimizers, comm="downpour")
        for number in range(2):
            session.rows(0)
            with session.no_sync():
                (model(batch(number, 4)[0]).sum() * float("nan")).backward()
            for optimizer in optimizers:
                optimizer.step()
        session.synchronize()
        same = all(torch.equal(p, q) for p, q in zip(model.parameters(), base.parameters(), strict=True))
        return same, session.report(model)["bytes_dense_per_iteration"]

    assert run_ranks(2, body) == [(True, 0.0)] * 2


def test_a_third_push_waits_for_the_answer_to_the_first() -> None:
    """A server that never answers: two pushes of each unit leave, and then the worker says for what it waits."""

    over = threading.Event()

    def body(session: Session) -> int:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="downpour")
        if session.rank:
            over.wait(LIMIT_SECONDS)
            return 0
        replay(model, optimizer, [[torch.ones(64, 64)]] * UNANSWERED)
        with pytest.raises(PeerLostError, match=r"rank 0 waited 1 s .* rank 1: answer to push 0 of layer \(root\)"):
            replay(model, optimizer, [[torch.ones(64, 64)]])
        over.set()
        return sum(session._exchange.traffic.messages.values())  # type: ignore[union-attr]

    def deaf(endpoint: Any) -> Any:
        return FaultyEndpoint(endpoint, [Fault("drop", Kind.PULL, times=10**6)]) if endpoint.rank else endpoint

    assert run_ranks(2, body, wrap=deaf, timeout=1.0, servers=[1])[0] == UNANSWERED


def test_a_lost_rank_ends_the_others_by_name() -> None:
    base = build("mlp")

    def body(session: Session) -> Any:
        model = clone(base, session.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="downpour")
        if session.rank == 2:
            for endpoint in session._exchange.endpoint._peers[:2]:  # type: ignore[union-attr]
                endpoint.lose(2, "connection reset")
            return None
        try:
            train(session, model, optimizer, 10**6)
        except PeerLostError as error:
            return error.rank, str(error)
        return None

    for lost, words in run_ranks(3, body)[:2]:
        assert lost == 2
        assert "rank 2 was lost: connection reset" in words


class Own(torch.optim.SGD):
    pass


def refusal(call: Any, *, ranks: int = 2, **options: Any) -> str:
    """The first rank's words; all end with the same."""

    def body(session: Session) -> str:
        with pytest.raises(UserError) as caught:
            call(session)
        return str(caught.value)

    said = run_ranks(ranks, body, **options)
    assert len(set(said)) == 1
    return str(said[0])


@pytest.mark.parametrize(
    ("optimize", "words"),
    [
        (torch.optim.LBFGS, "torch.optim.lbfgs.LBFGS may not allow: take one of torch.optim's own SGD, Adam, AdamW"),
        (Own, "test_downpour.Own may not allow"),
        (lambda p: [torch.optim.SGD(p), torch.optim.Adam(p)], "two of the optimizers step the same parameter"),
    ],
)
def test_refuses_optimizers_that_cannot_step_slices(optimize: Any, words: str) -> None:
    def call(session: Session) -> None:
        model = nn.Linear(4, 4)
        session.distribute(model, optimize(list(model.parameters())), comm="downpour")

    assert words in refusal(call)


def test_refuses_structures_that_it_does_not_know() -> None:
    def call(session: Session) -> None:
        model = nn.Linear(4, 4)
        session.distribute(model, torch.optim.SGD(model.parameters()), comm="downpour")

    assert "one worker per node" in refusal(call, devices=[2])
    with pytest.raises(UserError, match="keeps its slices on worker nodes"):
        _check_topology(Topology.of([1, 1], 1))

    def synced(session: Session) -> None:
        model = poseidon.sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)))
        session.distribute(model, torch.optim.SGD(model.parameters()), comm="downpour")

    assert "synchronised batch-norm cannot" in refusal(synced)


def with_closure(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: 0.0)


def with_another(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    replay(model, torch.optim.Adam(model.parameters()), [[torch.ones(4, 4), None]])


def unfrozen(session: Session, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.bias.requires_grad_(True)
    replay(model, optimizer, [[None, torch.ones(4)]])


def saved(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    replay(model, optimizer, [[torch.ones(4, 4), None]])
    optimizer.state_dict()


def joined(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with session.join():
        pass


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (with_closure, "SGD.step(closure) under comm='downpour'"),
        (with_another, "Adam steps parameters of a model under comm='downpour', but was not given"),
        (unfrozen, "parameter bias was frozen"),
        (saved, "the servers have the optimizer's state; call session.synchronize()"),
        (joined, "a model of this session goes by comm='downpour'"),
    ],
)
def test_refuses_what_would_go_past_the_servers(call: Any, words: str) -> None:
    def run(session: Session) -> None:
        model = nn.Linear(4, 4)
        model.bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="downpour")
        call(session, model, optimizer)

    assert words in refusal(run)


def test_one_rank_alone_trains_plainly() -> None:
    base = build("mlp")
    model, session = copy.deepcopy(base), poseidon.init()
    optimizer = torch.optim.LBFGS(model.parameters())
    session.distribute(model, optimizer, comm="downpour")
    optimizer.step(lambda: model(batch(0, 2)[0]).sum())
    session.synchronize()
    assert session.report(model)["bytes_planned_per_iteration"] == 0.0
    session.close()
