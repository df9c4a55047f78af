"""SSP(s) in scripts that do what is unusual: weights that are the same on every rank, or one line."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.errors import UserError
from tests.matrix.test_staleness_uses import assert_same, forward, trained

After = Callable[[Session, nn.Module, Any, int], None]


@contextmanager
def bf16() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


def evaluates(context: Callable[[], Any], rank: int, at: int = 3) -> After:
    """One rank alone evaluates in that context, and so applies what waits there."""

    def after(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
        if session.rank == rank and step == at:
            model.eval()
            with context():
                model(torch.zeros(1, 40))
            model.train()

    return after


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


@pytest.mark.parametrize("context", [bf16, torch.inference_mode])
def test_contexts_of_an_evaluation_change_nothing(context: Callable[[], Any]) -> None:
    """At step 2 nothing has been applied: the optimizer makes its state there."""
    one, other = trained(after=evaluates(context, 0, at=2), optimizer=adam, staleness=3, steps=6)
    assert_same([one], [other])


def test_zeroed_through_data() -> None:
    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.zero_()
        model(x).square().mean().backward()

    assert_same(trained(step), trained())


def test_gradients_of_the_inputs_before_zeroing() -> None:
    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        torch.autograd.grad(model(x.requires_grad_()).sum(), x)
        forward(session, model, optimizer, x.detach(), number)

    assert_same(trained(step), trained())


@pytest.mark.parametrize("mode", ["newest", "fixed"])
def test_gradients_in_memory_of_the_users(mode: str) -> None:
    """Views of one buffer, written to again while they are under way."""
    buffers: dict[int, torch.Tensor] = {}

    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        params = list(model.parameters())
        buffer = buffers.setdefault(session.rank, torch.zeros(sum(p.numel() for p in params)))
        buffer.zero_()
        for p, part in zip(params, buffer.split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p)
        model(x).square().mean().backward()

    one, other = trained(step, mode=mode, steps=6, merge_bytes=0, comm="ps")
    assert_same([one], [other])
    if mode == "fixed":
        assert_same([one, other], trained(steps=6, merge_bytes=0, comm="ps"))


def test_parameters_added_to_the_optimizer_get_no_older_gradient() -> None:
    """What was under way then changes them on no rank, however far it is."""

    def after(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
        if step != 3:
            return
        if session.rank:
            session.drain()
        optimizer.add_param_group({"params": list(model[4].parameters())})  # type: ignore[index]

    def part(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[:4].parameters(), 0.1)  # type: ignore[index]

    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        model.zero_grad()
        forward(session, model, optimizer, x, number)

    one, other = trained(step, optimizer=part, after=after)
    assert_same([one], [other])


def test_loaded_by_assignment() -> None:
    """The parameters of before keep their gradients."""

    def after(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 3:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            optimizer.state.clear()
            optimizer.param_groups[0]["params"] = list(model.parameters())

    for mode in ("fixed", "newest"):
        one, other = trained(after=after, mode=mode)
        assert_same([one], [other])


def test_hooks_of_a_step_may_read_and_write_weights() -> None:
    """They run once for each average."""
    calls: list[int] = []

    def clamping(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def hook(*_: object) -> None:
            model.state_dict()
            optimizer.state_dict()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
            calls.append(1)

        optimizer.register_step_post_hook(hook)
        return optimizer

    for mode in ("fixed", "newest"):
        one, other = trained(optimizer=clamping, mode=mode, after=evaluates(torch.no_grad, 1))
        assert_same([one], [other])
        assert len(calls) == 2 * 5
        calls.clear()


def test_saved_in_the_middle_of_an_iteration_is_told(caplog: pytest.LogCaptureFixture) -> None:
    held = []

    def after(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
        if session.rank == 0 and step >= 3:
            held.append(model(torch.zeros(1, 40)))
            model.state_dict()
            optimizer.state_dict()

    with caplog.at_level(logging.WARNING):
        one, other = trained(after=after, optimizer=adam)
    assert_same([one], [other])
    told = [record.getMessage() for record in caplog.records if "state_dict made in the middle" in record.getMessage()]
    assert len(told) == 1


def test_a_model_that_is_only_passed_through() -> None:
    """A GAN's other half, frozen meanwhile: what its own steps have sent is applied where its weights are read."""

    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        forward(session, model, optimizer, x, number)
        optimizer.step()
        model.requires_grad_(False)
        x = x.requires_grad_()
        model(x).sum().backward()
        model.requires_grad_(True)
        read.append((number, session.rank, copy.deepcopy(model.state_dict())))
        forward(session, model, optimizer, x.detach(), number)

    read: list[tuple[int, int, dict[str, torch.Tensor]]] = []
    trained(step, steps=3)
    for number in range(3):
        one, other = [state for its, _, state in read if its == number]
        assert_same([list(one.values())], [list(other.values())])


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, and in itself, whether there are gradients or not, and changes weights by it."""

    made = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            with torch.no_grad():
                for p in group["params"]:
                    p.mul_(1 - 0.01 * self.made * group["steps"])
        super().step()


class Ahead(torch.optim.Optimizer):
    """Lookahead: goes back half the way every other step."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = Counting(model.parameters(), 0.1, momentum=0.9)
        super().__init__(list(model.parameters()), {})
        self.param_groups = self.inner.param_groups
        self.made = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.made += 1
        if self.made % 2 == 0:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    slow = self.state[p].setdefault("slow", torch.zeros_like(p))
                    p.copy_(slow.add_(p - slow, alpha=0.5))


@pytest.mark.parametrize("optimizer", [lambda model: Counting(model.parameters(), 0.1), Ahead], ids=["counts", "ahead"])
def test_what_counts_steps_counts_averages(optimizer: Callable[[nn.Module], Any]) -> None:
    """However they are spread over the user's steps: with s = 9 all are applied at the end."""

    def late(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
        if session.rank == 1:
            session.drain()

    first = trained(optimizer=optimizer, staleness=9, steps=2)
    assert_same([first[0]], [first[1]])
    for mode in ("fixed", "newest"):
        one, other = trained(optimizer=optimizer, mode=mode, after=late, steps=6)
        assert_same([one], [other])


def test_hooks_before_a_step_find_gradients() -> None:
    """Also in the first steps, which apply nothing."""
    seen: list[int] = []

    def clipping(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def hook(*_: object) -> None:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.clamp_(-0.01, 0.01)
            seen.append(1)

        optimizer.register_step_pre_hook(hook)
        return optimizer

    one, other = trained(optimizer=clipping, mode="newest")
    assert_same([one], [other])
    assert len(seen) == 2 * 5


@pytest.mark.slow
def test_a_compiled_step_is_refused() -> None:
    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        forward(session, model, optimizer, x, number)
        torch.compile(lambda: optimizer.step(), backend="eager")()

    with pytest.raises(UserError, match=r"a compiled optimizer step: .*do not compile step\(\)"):
        trained(step, optimizer=adam)


@pytest.mark.slow
def test_a_compiled_model_drains() -> None:
    """Its evaluation does so inside of the compiled call."""
    compiled: dict[int, Callable[..., Any]] = {}

    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        its = compiled.setdefault(session.rank, torch.compile(model, backend="eager"))
        if number == 3 and session.rank == 0:
            model.eval()
            with torch.no_grad():
                its(x)
            model.train()
        optimizer.zero_grad()
        its(x).square().mean().backward()

    one, other = trained(step)  # SGD: Adam computes otherwise while another thread compiles
    assert_same([one], [other])


class Failing(torch.optim.SGD):
    """Raises when it has three gradients."""

    applied = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.applied += self.param_groups[0]["params"][0].grad is not None
        if self.applied == 3:
            raise ValueError("too much")
        super().step()


def test_an_optimizer_that_raises() -> None:
    """What it says is not buried, and nothing is applied after it."""
    with pytest.raises(ValueError, match="too much"):
        trained(optimizer=lambda model: Failing(model.parameters(), 0.1))


def grown(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 3:
        model[4].weight.data = torch.ones(2, 50)  # type: ignore[index]
        model[4].bias.data = torch.ones(2)  # type: ignore[index]


def stranger(session: Session, model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 2:
        extra = nn.Parameter(torch.ones(2))
        extra.grad = torch.ones(2)
        optimizer.add_param_group({"params": [extra]})


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (grown, r"4\.weight was changed in type, shape .* call session\.synchronize\(\) before"),
        (stranger, r"SGD also steps parameters that are not of this model.*; make an optimizer of their own"),
    ],
)
def test_told_in_one_line(after: After, words: str) -> None:
    def step(session: Session, model: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    with pytest.raises(UserError, match=words) as error:
        trained(step, after=after)
    assert "\n" not in str(error.value)
