"""Hardware profiles as configs: what ships with the package, and what is refused."""

from __future__ import annotations

import json

import pytest

from poseidon.config import dump_spec, load_spec
from poseidon.config.check import check_train
from poseidon.config.compose import compose
from poseidon.config.density import densities
from poseidon.config.hardware import HardwareConfig, LayerSeconds, LayerTable, Trust
from poseidon.config.paths import conf_dir
from poseidon.errors import UserError
from poseidon.tracking import summary

SHIPPED = sorted(file.stem for file in (conf_dir() / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_composes_and_says_where_each_figure_comes_from(name: str):
    config = compose("train", [f"hardware={name}"])
    check_train(config)
    profile = config.hardware
    assert profile.name == name
    assert profile.source
    entries = [entry for entry in profile.iterations.values() if entry is not None]
    assert entries
    assert all(entry.source for entry in entries)
    rates = ("flops", "flops_batchnorm", "memory_bandwidth", "host_copy", "server_sum")
    assert all(profile.provenance(key).source for key in rates if getattr(profile, key) is not None)


def test_without_a_profile_the_machine_itself_computes():
    assert compose("train").hardware is None


def test_the_papers_single_node_speeds():
    titan, k20 = (compose("train", [f"hardware={name}"]).hardware for name in ("titan_x", "k20"))
    assert titan.iterations["vgg19_22k"].seconds == 0.925
    assert titan.iterations["vgg19_22k"].trust is Trust.published
    assert titan.iterations["inception_v3"].trust is Trust.unverified
    assert titan.provenance("host_copy").trust is Trust.derived
    assert titan.provenance("name").trust is Trust.unverified
    assert 1.2 <= k20.iterations["alexnet"].seconds <= 1.7
    assert titan.iterations["cifar10_quick"] is k20.iterations["cifar10_quick"] is None


def test_a_profile_goes_to_the_ranks(tmp_path):
    config = compose("train", ["hardware=titan_x", "+hardware.layers={x: {seconds: {a: {forward: 1}}}}"])
    dump_spec(tmp_path / "spec.json", config, [], tmp_path)
    assert load_spec(tmp_path / "spec.json").config == config
    json.loads((tmp_path / "spec.json").read_text())


def test_a_profile_of_one_s_own(tmp_path):
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text("name: mine\niterations: {lenet: {batch_size: 32, seconds: 1}}\n")
    profile = compose("train", ["hardware=mine"], tmp_path).hardware
    assert profile.iterations["lenet"].seconds == 1.0
    assert (profile.flops, profile.host_copy) == (None, None)
    (tmp_path / "hardware" / "mine.yaml").write_text("name: mine\nflop: 3\n")
    with pytest.raises(
        UserError,
        match=r"^hardware\.flop \(in hardware/mine\.yaml\): there is no such key; did you mean hardware\.flops",
    ):
        compose("train", ["hardware=mine"], tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hardware=titan", "hardware=titan: there is no such choice; did you mean titan_x? hardware is"),
        ("hardware.flops=-1", "hardware.flops=-1.0: must be greater than 0, or null"),
        ("hardware.flops=many", "hardware.flops=many: must be a number or null"),
        ("hardware.trust=gospel", "hardware.trust=gospel: must be measured, published, derived, assumed or unverified"),
        ("hardware.iterations.alexnet.seconds=0", "hardware.iterations.alexnet.seconds=0.0: must be greater than 0"),
        (
            "+hardware.iterations={x: {batch_size: 0, seconds: 1}}",
            "hardware.iterations.x.batch_size=0: must be greater than 0",
        ),
        (
            "+hardware.layers={x: {seconds: {a: {forward: -1}}}}",
            "hardware.layers.x.seconds.a.forward=-1.0: must be at least 0",
        ),
        ("+hardware.layers={x: {seconds: {}}}", "hardware.layers.x.seconds: no layer takes any time"),
        (
            "+hardware.sources={hostcopy: {source: me}}",
            "hardware.sources.hostcopy: there is no such key; did you mean host_copy?",
        ),
    ],
)
def test_what_a_profile_cannot_say_is_one_line(override: str, said: str):
    with pytest.raises(UserError) as error:
        check_train(compose("train", ["hardware=titan_x", override]))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_key_of_hardware_needs_a_choice_first():
    for override in ("hardware.flops=1e12", "+hardware.iterations={x: {batch_size: 1, seconds: 1}}"):
        with pytest.raises(UserError) as error:
            compose("train", [override])
        assert str(error.value) == f"{override}: hardware is null, and has no keys; choose one, hardware=..."


@pytest.mark.parametrize(
    ("model", "rows", "said"),
    [
        (
            "vgg19_22k",
            64,
            "0.925 s per iteration of 32 rows (published: P17's Caffe baseline on one machine), linearly for 64 rows, "
            "shared out among the layers by FLOPs",
        ),
        (
            "resnet152",
            32,
            "the model's FLOPs at the profile's rate (assumed: AlexNet's 0.25 s or assumed: Inception-V3's 43.2 "
            "images/s), shared out among the layers by FLOPs",
        ),
    ],
)
def test_a_run_s_record_says_what_its_times_rest_on(model: str, rows: int, said: str):
    config = compose("train", ["hardware=titan_x", f"model={model}", f"trainer.batch_size={rows}"])
    assert summary.begin(config, [])["hardware_basis"] == said


def test_a_measured_table_is_named():
    table = LayerTable("me", Trust.measured, 8, {"fc": LayerSeconds(0.1, 0.2)})
    said = HardwareConfig(layers={"m": table}).basis("m", 8)
    assert said == "0.3 s per iteration of 8 rows (measured: me), shared out among the layers by a measured table"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+model.density={fc6: {u: 2}}", "model.density.fc6.u=2: must lie between 0 and 1"),
        ("+model.density={fc6: {w: 0.5}}", "model.density.fc6={'w': 0.5}: must be the shares of non-zeros"),
        ("+model.density=0.5", "model.density=0.5: must give shares by layer"),
    ],
)
def test_a_density_is_a_share_by_layer(override: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        check_train(compose("train", ["model=lenet", override]))
    assert str(error.value).startswith(said)


def test_networks_of_the_papers_are_as_sparse_as_measured() -> None:
    for model in ("alexnet", "alexnet_22k", "vgg19", "vgg19_22k"):
        found = densities(compose("train", [f"model={model}", "dataset=synthetic"]).model)
        assert len(found) == 3
        assert all(0 < share < 1 for density in list(found.values())[:2] for share in density)
