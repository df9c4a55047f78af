"""The user's step where averages are applied by steps of our own: it goes by and changes nothing.

Without gradients alone it would: optimizers count their steps (for bias corrections, slow weights), hooks act. How
often the user steps differs from how much is applied, and by rank, so all of that belongs to our steps.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from poseidon.engine.backward import Hook
from poseidon.schemes import autocast_device


def stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Of its class, with copies of what it counts in, and parameters that have shapes only: to be stepped in vain."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [
        {**group, "params": [torch.empty_like(p, device="meta") for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    other.state = copy.copy(optimizer.state)
    return other


def pass_by(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor], then: Callable[[], None]) -> None:
    """In an optimizer's first pre-hook: its own hooks do not run in this step, nor have `params` gradients.

    Args:
        then: called when it is made; all is as before.
    """
    kept = [(p, p.grad) for p in params]
    # Handles find their hooks in these very dictionaries. torch begins to go through each only after the hooks before
    # it, and has got through the second when the one hook that is in it then runs.
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooks_before, hooks_after = dict(before), dict(after)
    for p, _ in kept:
        p.grad = None
    before.clear()
    after.clear()

    def over(*_: object) -> None:
        handle.remove()
        before.update(hooks_before)
        after.update(hooks_after)
        for p, grad in kept:
            p.grad = grad
        then()

    handle = optimizer.register_step_post_hook(Hook(over))


@contextlib.contextmanager
def apart(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Around a step of our own, whatever the user steps or reads weights in: state made there would be of no use
    outside, or less precise, and transforms (torch.func) forbid it."""
    device = autocast_device(params[0]) if params else "cpu"
    plain = torch._C._DisableFuncTorch()
    with plain, torch.inference_mode(mode=False), torch.autocast(device, enabled=False):
        yield


def plainly(call: Callable[[], None]) -> None:
    """Never compiled, also where it is called inside of what is."""
    (torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call)()
