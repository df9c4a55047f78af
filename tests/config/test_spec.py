from __future__ import annotations

import json

import pytest

from poseidon.config import dump_spec, from_plain, load_spec, to_plain
from poseidon.config.compose import compose
from poseidon.config.schema import Encryption, Precision, TrainConfig
from poseidon.errors import UserError


def test_a_spec_comes_back_as_it_was(tmp_path):
    config = compose("train", ["comm.encryption=curve", "trainer.precision=bf16", "schedule=cosine", "comm=ddp"])
    dump_spec(tmp_path / "spec.json", config, ["comm=ddp"], tmp_path / "run")
    spec = load_spec(tmp_path / "spec.json")
    assert spec.config == config
    assert spec.config.comm.encryption is Encryption.curve
    assert spec.config.trainer.precision is Precision.bf16
    assert (spec.overrides, spec.run_dir) == (["comm=ddp"], str(tmp_path / "run"))
    assert spec.plain == to_plain(config) == json.loads((tmp_path / "spec.json").read_text())["config"]
    assert [file.name for file in tmp_path.iterdir()] == ["spec.json"]


def test_nodes_are_numbers_wherever_they_come_from():
    for given in ("={1: 100mbit}", ".1=100mbit"):
        config = compose("train", ["cluster=emulated", f"+cluster.node_bandwidth{given}"])
        assert config.cluster.node_bandwidth == {1: "100mbit"}
        assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


def test_keys_that_are_left_out_have_their_defaults():
    assert from_plain({"seed": 4}) == TrainConfig(seed=4)


def test_text_that_looks_like_an_interpolation_stays_text(tmp_path):
    config = TrainConfig(model={"_target_": "a.B", "text": "${oc.env:HOME}"})
    dump_spec(tmp_path / "spec.json", config, [], tmp_path)
    assert load_spec(tmp_path / "spec.json").config.model["text"] == "${oc.env:HOME}"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"config": {"comm": {"overlop": "none"}}, "overrides": [], "run_dir": ""}', '{"config": {}}']
)
def test_something_else_is_not_a_spec(tmp_path, text):
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(UserError, match=r"spec\.json: is not a spec"):
        load_spec(tmp_path / "spec.json")


def test_no_file_is_the_user_s_mistake(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_spec(tmp_path / "spec.json")


def test_what_json_does_not_know_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        dump_spec(tmp_path / "spec.json", TrainConfig(model={"a": object()}), [], tmp_path)
    assert list(tmp_path.iterdir()) == []
