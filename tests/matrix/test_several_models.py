"""Several models in one session, and one model distributed several times, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from poseidon.api import Session
from poseidon.errors import UserError
from tests.engine.nets import assert_exact
from tests.matrix.harness import COMMS, SIZES, F, mean_square
from tests.ranks import run_ranks

Params = list[torch.Tensor | None]
STEPS = 4

torch.manual_seed(0)
GENERATOR = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))
CRITIC = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
ENCODER = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def rows(step: int, width: int, sizes: list[int], rank: int | None) -> torch.Tensor:
    """A rank's rows of step `step`; without a rank, all."""
    x = torch.randn(sum(sizes), width, generator=torch.Generator().manual_seed(10 * step + width))
    return x if rank is None else x[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def values(*models: nn.Module) -> Params:
    return [p.detach().clone() for model in models for p in model.parameters()]


Train = Callable[[list[nn.Module], list[torch.optim.Optimizer], list[int], Session | None], None]


def assert_equals_one_process(bases: list[nn.Module], train: Train, comm: str, sizes: list[int]) -> None:
    """Parameters of all models after training; SGD, so that rounding is not amplified."""

    def body(session: Session) -> Params:
        models = [copy.deepcopy(base) for base in bases]
        optimizers = [sgd(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        train(models, optimizers, sizes, session)
        return values(*models)

    alone = [copy.deepcopy(base) for base in bases]
    train(alone, [sgd(model) for model in alone], sizes, None)
    ranks = run_ranks(len(sizes), body)
    for got in ranks:
        assert_exact(got, values(*alone))
        assert all(torch.equal(a, b) for a, b in zip(got, ranks[0], strict=True))


def adversaries(penalty: bool) -> Train:
    """A GAN: critic and generator take turns; the generator's pass goes through the critic too."""

    def train(models: Any, optimizers: Any, sizes: list[int], session: Any) -> None:
        generator, critic = models
        rank = None if session is None else session.rank
        for step in range(STEPS):
            real, noise = rows(step, 6, sizes, rank), rows(step, 3, sizes, rank)
            optimizers[1].zero_grad()
            fake = generator(noise)
            loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
            if penalty:  # WGAN-GP, R1
                between = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                loss = loss + slope.square().sum(1).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            optimizers[0].step()

    return train


def two_passes_of_the_critic(models: Any, optimizers: Any, sizes: list[int], session: Any) -> None:
    """Real and fake in backward passes of their own; three critic steps per generator step; clipped weights."""
    generator, critic = models
    rank = None if session is None else session.rank
    for step in range(STEPS):
        noise = rows(step, 3, sizes, rank)
        for part in range(3):
            critic.zero_grad()
            (-critic(rows(100 * part + step, 6, sizes, rank)).mean()).backward()
            critic(generator(noise).detach()).mean().backward()
            optimizers[1].step()
            for p in critic.parameters():
                p.data.clamp_(-0.3, 0.3)
        for p in critic.parameters():
            p.requires_grad_(False)
        generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        optimizers[0].step()
        for p in critic.parameters():
            p.requires_grad_(True)


def one_loss(models: Any, optimizers: Any, sizes: list[int], session: Any) -> None:
    """Two models, one loss, one backward pass."""
    encoder, critic = models
    rank = None if session is None else session.rank
    for step in range(STEPS):
        x = rows(step, 6, sizes, rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (mean_square(encoder(x), torch.ones(len(x))) + mean_square(critic(x), torch.ones(len(x)))).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()


def distilled(models: Any, optimizers: Any, sizes: list[int], session: Any) -> None:
    """A teacher that is distributed and trained too gives the targets."""
    student, teacher = models
    rank = None if session is None else session.rank
    for step in range(STEPS):
        x = rows(step, 6, sizes, rank)
        with torch.no_grad():
            target = teacher(x)
        for model, optimizer, aim in ((student, optimizers[0], target), (teacher, optimizers[1], x[:, :4])):
            optimizer.zero_grad()
            F.mse_loss(model(x), aim).backward()
            optimizer.step()


CASES: dict[str, tuple[list[nn.Module], Train]] = {
    "adversaries": ([GENERATOR, CRITIC], adversaries(False)),
    "adversaries, penalty": ([GENERATOR, CRITIC], adversaries(True)),
    "critic in two passes": ([GENERATOR, CRITIC], two_passes_of_the_critic),
    "one loss": ([ENCODER, CRITIC], one_loss),
    "student and teacher": ([ENCODER, ENCODER], distilled),
}


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_several_models_equal_one_process(name: str, sizes: list[int], comm: str) -> None:
    assert_equals_one_process(*CASES[name], comm, sizes)


@pytest.mark.parametrize("comm", COMMS)
def test_a_critic_alone_equals_one_process(comm: str) -> None:
    """Of a GAN only the critic is distributed; each rank has a generator of its own that is never trained."""

    def train(models: Any, optimizers: Any, sizes: list[int], session: Any) -> None:
        rank = None if session is None else session.rank
        for step in range(STEPS):
            optimizers[0].zero_grad()
            models[0](GENERATOR(rows(step, 3, sizes, rank))).square().mean().backward()
            optimizers[0].step()

    assert_equals_one_process([CRITIC], train, comm, [5, 3])


def plain_step(model: nn.Module, optimizer: Any, step: int, sizes: list[int], rank: int | None) -> None:
    optimizer.zero_grad()
    x = rows(step, 6, sizes, rank)
    mean_square(model(x), torch.ones(len(x))).backward()
    optimizer.step()


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("sizes", SIZES, ids=["2 ranks", "3 ranks"])
def test_distributed_undistributed_and_distributed_again(sizes: list[int], comm: str) -> None:
    """With other schemes, and steps between in which every rank has all rows and needs nobody."""

    def body(session: Session) -> tuple[Params, list[str]]:
        model = copy.deepcopy(ENCODER)
        optimizer = sgd(model)
        kinds = []
        for turn, its_comm in enumerate([comm, "ps", comm]):
            session.distribute(model, optimizer, comm=its_comm)  # type: ignore[arg-type]
            for step in range(3):
                plain_step(model, optimizer, 10 * turn + step, sizes, session.rank)
            session.undistribute(model)
            kinds += [type(module).__name__ for module in model.modules() if module._forward_pre_hooks]
            plain_step(model, optimizer, 10 * turn + 5, sizes, None)
        with pytest.raises(UserError, match="not distributed"):
            session.report(model)
        return values(model), kinds

    alone = copy.deepcopy(ENCODER)
    optimizer = sgd(alone)
    for turn in range(3):
        for step in (0, 1, 2, 5):
            plain_step(alone, optimizer, 10 * turn + step, sizes, None)
    for got, kinds in run_ranks(len(sizes), body):
        assert_exact(got, values(alone))
        assert not kinds


def test_distributed_twice_at_once_is_refused() -> None:
    def body(session: Session) -> None:
        model = copy.deepcopy(ENCODER)
        session.distribute(model, sgd(model))
        with pytest.raises(UserError, match="distributed already"):
            session.distribute(model, sgd(model))

    run_ranks(2, body)


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize("wrap", [nn.DataParallel, DistributedDataParallel, fully_shard])
def test_a_model_that_pytorch_has_made_data_parallel_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = nn.ModuleList([nn.Linear(2, 2), wrap(copy.deepcopy(ENCODER))])

    def body(session: Session) -> None:
        for model, where in ((wrapped, "layer 1 is"), (wrapped[1], "the model is")):
            with pytest.raises(UserError, match=f"{where} made data-parallel by PyTorch's .*wrapper.module"):
                session.distribute(model, sgd(model))

    run_ranks(2, body)


@pytest.mark.parametrize("comm", COMMS)
def test_models_with_a_common_part(comm: str) -> None:
    """Two models that share a layer: each one's pass synchronises its own."""

    def train(models: Any, optimizers: Any, sizes: list[int], session: Any) -> None:
        rank = None if session is None else session.rank
        for step in range(STEPS):
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                plain_step(model, optimizer, 10 * number + step, sizes, rank)

    def pair() -> list[nn.Module]:
        shared = copy.deepcopy(ENCODER)
        torch.manual_seed(1)
        return [nn.Sequential(shared, nn.Linear(4, 3)), nn.Sequential(shared, nn.Linear(4, 2))]

    bases = pair()

    def body(session: Session) -> Params:
        models = copy.deepcopy(bases)
        optimizers = [sgd(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.distribute(model, optimizer, comm=comm)  # type: ignore[arg-type]
        train(models, optimizers, [5, 3], session)
        return values(*models)

    alone = copy.deepcopy(bases)
    train(alone, [sgd(model) for model in alone], [5, 3], None)
    for got in run_ranks(2, body):
        assert_exact(got, values(*alone))
