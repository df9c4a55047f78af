"""Processes that a training script starts on the side (data-loading workers ...) never touch the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.test_processes import run_script

TRAIN = """
import copy
import os
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import poseidon
from poseidon.errors import UserError

SESSION = None

class Encoded(Dataset):
    '''Rows made with the very model that is being trained, with and without a gradient.'''

    def __init__(self, model):
        self.model = model  # spawned workers share its memory: batch-norm must not write

    def __len__(self):
        return 12

    def __getitem__(self, i):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(i))
        self.model.eval()
        with torch.no_grad():
            self.model(x)
        loss = self.model(x).square().mean()
        loss.backward()
        missing = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing, missing
        self.model.state_dict()
        if SESSION is not None:
            SESSION.close()  # as a handler of atexit would
            for use in (SESSION.synchronize, SESSION.barrier, lambda: SESSION.report(self.model)):
                try:
                    use()
                except UserError as error:
                    assert "forked" in str(error)
                else:
                    raise AssertionError("not refused")
        return x[0]

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))

def train(model, optimizer, session, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x[session.rank::2]).square().mean().backward()
        optimizer.step()

def rows():
    return torch.stack([torch.randn(2, 6, generator=torch.Generator().manual_seed(i))[0] for i in range(12)]).split(4)

def main():
    global SESSION
    SESSION = session = poseidon.init(timeout=60)
    digests = []
    for way in ("none", "fork", "spawn"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="sfb")
        batches = rows()
        train(model, optimizer, session, batches[:1])
        if way == "none":
            batches = batches[1:]
        else:
            loader = DataLoader(Encoded(model), batch_size=4, num_workers=1, multiprocessing_context=way)
            batches = list(loader)[1:]
        optimizer.zero_grad()
        train(model, optimizer, session, batches)
        digests.append(session.digest(model))
        session.undistribute(model)
    assert len(set(digests)) == 1, digests
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs the handlers of atexit
    assert os.waitpid(child, 0)[1] == 0
    session.barrier()
    assert len(set(session.gather(digests[0]))) == 1
    print("DONE", flush=True)
    session.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_that_use_the_model_leave_the_engine_alone(tmp_path: Path) -> None:
    output, ok, reason = run_script(tmp_path, TRAIN)
    assert ok, f"{reason}\n{output}"
    assert output.count("DONE") == 2
    assert "Warning" not in output
