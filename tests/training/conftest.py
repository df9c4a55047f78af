from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from poseidon.config.schema import Comm, TrainConfig
from poseidon.training.metrics import accuracy
from poseidon.training.parts import Parts

torch.set_num_threads(1)
LOCK = threading.Lock()


@pytest.fixture(scope="session")
def digits() -> tuple[TensorDataset, TensorDataset]:
    """8x8 digits: 1,000 to train, 300 to evaluate."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:1300], y[1000:1300])


@pytest.fixture
def make_parts(digits: Any) -> Callable[..., Parts]:
    """Fresh parts of a small MLP with SGD; keywords replace parts, ``rows`` cuts the training set."""

    def make(rows: int = 1000, dropout: float = 0.0, schedule: Any = None, **replaced: Any) -> Parts:
        with LOCK:  # threads share one random generator
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parts = Parts(
            model=model,
            optimizer=optimizer,
            loss=nn.CrossEntropyLoss(),
            metric=accuracy,
            train=TensorDataset(*(t[:rows] for t in digits[0].tensors)),
            evaluation=digits[1],
            train_size=rows,
            eval_size=300,
            schedule=schedule(optimizer) if schedule else None,
        )
        return Parts(**{**vars(parts), **replaced})

    return make


def make_config(comm: Comm = Comm.hybrid, seed: int = 0, **trainer: Any) -> TrainConfig:
    config = TrainConfig(seed=seed)
    config.comm.name = comm
    config.trainer.checkpoint = False
    for key, value in trainer.items():
        assert hasattr(config.trainer, key)
        setattr(config.trainer, key, value)
    return config
