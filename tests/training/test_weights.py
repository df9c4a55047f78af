"""model.weights: what a run starts from, through the config."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import init
from poseidon.config.compose import compose
from poseidon.errors import UserError
from poseidon.training import checkpoint
from poseidon.training.loop import Outputs, Trainer
from poseidon.training.parts import Parts, assemble

from .fakes import FakeSession

DIGITS = ["model=mlp", "dataset=digits", "model.widths=[16]", "trainer.batch_size=64"]


def parts(*overrides: str) -> Parts:
    return assemble(compose("train", [*DIGITS, *overrides]), torch.device("cpu"))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


def same(a: nn.Module, b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, b[key]) for key, value in a.state_dict().items())


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a run, and its weights."""
    config = compose("train", [*DIGITS, "trainer.epochs=null", "trainer.iterations=3"])
    with init(device="cpu") as session:
        trainer = Trainer(session, assemble(config, session.device), config, Outputs(checkpoints=tmp_path))
        trainer.run()
    return tmp_path / "last.pt", weights(trainer.model)


def test_starts_from_a_checkpoint_s_weights_but_at_the_beginning(trained: Any) -> None:
    path, expected = trained
    config = compose("train", [*DIGITS, f"model.weights={path}"])
    found = assemble(config, torch.device("cpu"))
    assert same(found.model, expected)
    assert not same(parts().model, expected)
    assert Trainer(FakeSession(), found, config).position.iteration == 0
    assert not found.optimizer.state  # no momentum of the other run


def test_a_head_of_another_size_is_named_with_what_to_add(trained: Any) -> None:
    path, expected = trained
    with pytest.raises(UserError) as caught:
        parts(f"model.weights={path}", "model.num_classes=7")
    message = str(caught.value)
    assert message == (
        f"model.weights={path}: head.weight is (10, 16) in the file, (7, 16) in this run's model; to start such "
        f"layers anew and load all others, add model.fresh=[head]"
    )
    model = parts(f"model.weights={path}", "model.num_classes=7", "model.fresh=[head]").model
    assert torch.equal(model.fc1.weight, expected["fc1.weight"])
    assert model.head.weight.shape == (7, 16)


def test_what_to_add_has_a_plus_if_the_config_has_no_such_key(trained: Any) -> None:
    with pytest.raises(UserError, match=r"add \+model.fresh=\[head\]$"):
        parts(f"model.weights={trained[0]}", "model.num_classes=7", "~model.fresh")


def test_a_resumed_run_does_not_read_them(trained: Any, caplog: pytest.LogCaptureFixture) -> None:
    path, expected = trained
    torch.save({}, path.with_name("other.pt"))
    config = compose("train", [*DIGITS, f"model.weights={path.with_name('other.pt')}", f"trainer.resume={path}"])
    with caplog.at_level(logging.WARNING, "poseidon"):
        found = assemble(config, torch.device("cpu"))
    assert "model.weights is not read: trainer.resume" in caplog.text
    assert Trainer(FakeSession(), found, config).position.iteration == 3
    assert same(found.model, expected)


def test_a_checkpoint_s_weights_are_its_model_s(tmp_path: Path) -> None:
    """The entry that is read is the one that is written."""
    found = parts()
    checkpoint.save(
        tmp_path / "c.pt", checkpoint.Position(), found.model, found.optimizer, None, seed=0, size=1, config={}
    )
    assert same(parts(f"model.weights={tmp_path / 'c.pt'}", "seed=5").model, weights(found.model))
