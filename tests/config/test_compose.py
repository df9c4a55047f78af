"""Everything in conf/ composes, and says what the schema says."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from poseidon.config import conf_dir
from poseidon.config.check import check_train
from poseidon.config.compose import compose
from poseidon.config.schema import Comm, Encryption, Overlap, TrainConfig
from tests.config.conftest import CUSTOM

CLOSED = ("cluster", "comm", "trainer", "seed", "device")
MISSING = {
    "model=torchvision": ["model.name=resnet18"],
    "loss=other": ["loss._target_=torch.nn.MSELoss"],
    "optimizer=other": ["optimizer._target_=torch.optim.SGD"],
}
CHOICES = sorted(
    f"{file.parent.name}={file.stem}" for file in conf_dir().glob("*/*.yaml") if file.parent.name != "experiment"
)
EXPERIMENTS = sorted(file.stem for file in (conf_dir() / "experiment").glob("*.yaml"))


def test_the_values_written_in_conf_are_the_schema_s_own():
    composed, schema = compose("train"), TrainConfig()
    for key in CLOSED:
        assert getattr(composed, key) == getattr(schema, key)


def test_conf_shows_every_key_of_the_trainer():
    shown = yaml.safe_load((conf_dir() / "trainer" / "default.yaml").read_text())
    assert set(shown) == {field.name for field in dataclasses.fields(TrainConfig().trainer)}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_passes_the_checks(choice):
    config = compose("train", [choice, *MISSING.get(choice, [])])
    check_train(config)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_passes_the_checks(name):
    config = compose("train", [f"experiment={name}"])
    check_train(config)
    assert config.tracking.experiment == name  # by which a report finds its runs


def test_every_comm_is_a_choice():
    for comm in Comm:
        assert compose("train", [f"comm={comm.value}"]).comm.name is comm


def test_keys_of_comm_hold_whatever_the_choice():
    comm = compose("train", ["comm=ps", "comm.overlap=none", "comm.encryption=none"]).comm
    assert (comm.name, comm.overlap, comm.encryption) == (Comm.ps, Overlap.none, Encryption.none)


def test_the_command_line_wins_over_an_experiment():
    config = compose("train", ["experiment=lenet_mnist", "comm=single", "trainer.epochs=1"])
    assert config.comm.name is Comm.single
    assert config.trainer.epochs == 1


def test_models_follow_the_shape_of_the_data():
    config = compose("train", ["dataset=synthetic", "dataset.shape=[3,64,64]", "dataset.num_classes=7"])
    assert config.model["shape"] == [3, 64, 64]
    assert config.model["num_classes"] == config.dataset["classes"] == 7


def test_more_choices_come_from_a_folder_of_one_s_own():
    config = compose("train", ["experiment=mine"], CUSTOM / "conf")
    assert config.model["_target_"] == "spirals.model.ResidualMLP"
    assert config.model["inputs"] == 2
