"""conf/experiment/: what each says it does is there to be done."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from poseidon import cli
from poseidon.config import conf_dir
from poseidon.config.check import check_train
from poseidon.config.compose import CommandLine, compose
from poseidon.config.schema import ClusterKind, Comm, Overlap, Rule
from poseidon.config.store import GBE
from poseidon.training.dilation import demand
from poseidon.training.plan import make_plan

FILES = sorted((conf_dir() / "experiment").glob("*.yaml"))
ON_LINKS = [(file.stem, rate) for file in FILES if file.stem.startswith("p17_") for rate in GBE]
PAPERS = [file.stem for file in FILES if file.stem.startswith(("p15_", "p17_"))]
COMMANDS = [
    (file, command)
    for folder in ("experiment", "comm", "trainer", "hardware", "model")
    for file in sorted((conf_dir() / folder).glob("*.yaml"))
    for command in re.findall(r"^# +poseidon ((?:train|profile|plan|report) [^#\n]*)", file.read_text(), re.MULTILINE)
    if "--config-dir" not in command  # of a reader's own
]


@pytest.mark.parametrize(("base", "rate"), ON_LINKS)
def test_p17_s_experiments_are_there_on_each_of_its_links(base: str, rate: int):
    name = f"{base}_{rate}gbe"
    here, there = compose("train", [f"experiment={name}"]), compose("train", [f"experiment={base}"])
    check_train(here)
    assert (here.cluster.bandwidth, here.tracking.experiment) == (f"{rate}gbit", name)
    here.cluster.bandwidth, here.tracking.experiment = there.cluster.bandwidth, there.tracking.experiment
    assert here == there


def test_the_papers_models_and_links_are_all_there():
    models = {"vgg19_22k", "vgg19", "googlenet", "inception_v3", "resnet152"}
    assert {base for base, _ in ON_LINKS} == {f"p17_{model}" for model in models}
    assert set(GBE) == {40, 30, 20, 10, 5, 2, 1}
    assert {"p15_alexnet", "p15_googlenet", "p15_cifar10_quick", "p15_imagenet22k"} <= set(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_experiments_are_emulated_and_few_iterations_long(name: str):
    config = compose("train", [f"experiment={name}"])
    assert config.cluster.name is ClusterKind.emulated
    assert (config.cluster.nodes, config.cluster.bandwidth, config.cluster.time_dilation) == (8, "40gbit", "auto")
    assert config.trainer.log_every > config.trainer.iterations  # nothing is exchanged between
    rows = config.trainer.iterations * config.trainer.batch_size * config.cluster.nodes
    assert config.dataset["size"] >= rows  # nor does an epoch end there
    assert config.hardware is not None
    config.cluster.nodes = 1
    assert demand(config).seconds > 0  # its hardware knows the model


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_every_experiment_has_a_plan(name: str):
    config = compose("train", [f"experiment={name}"])
    if config.dataset.get("shape") is None:
        config = compose("train", [f"experiment={name}", "trainer.batch_size=4"])
    plan = make_plan(config)
    assert plan.nodes == config.cluster.nodes
    assert plan.bytes_sent_per_node > 0


@pytest.mark.parametrize(("file", "command"), COMMANDS, ids=lambda value: getattr(value, "stem", value))
def test_the_commands_written_in_the_files_are_right(file: Path, command: str):
    workflow, *arguments = shlex.split(command)
    if workflow == "report":
        (override,) = arguments
        assert override == f"report.experiment={compose('train', [f'experiment={file.stem}']).tracking.experiment}"
        return
    line = CommandLine.parse(workflow, arguments)
    axes = line.axes()
    assert line.multirun == bool(axes)
    for pick in (0, -1):
        job = [o for o in line.overrides if o.partition("=")[0] not in axes]
        check_train(compose(workflow, [*job, *(f"{key}={values[pick]}" for key, values in axes.items())]))


def test_files_with_commands_were_found():
    assert {file.stem for file, _ in COMMANDS} >= {"p15_alexnet", "p17_vgg19_22k", "convergence_lenet", "titan_x"}


@pytest.mark.parametrize(
    ("choice", "means"),
    [
        ("caffe_ps", (Comm.ps, Overlap.none, Rule.time)),  # where nothing is chosen, no rule matters
        ("wfbp", (Comm.ps, Overlap.backward, Rule.time)),
        ("poseidon", (Comm.hybrid, Overlap.backward, Rule.paper)),
    ],
)
def test_the_steps_of_the_papers_ablation_are_choices_of_comm(choice: str, means: tuple[Comm, Overlap, Rule]):
    for experiment in ([], ["experiment=p15_alexnet"]):
        comm = compose("train", [*experiment, f"comm={choice}"]).comm
        assert (comm.name, comm.overlap, comm.rule) == means
    assert compose("train", [f"comm={choice}", "comm.timeout=5"]).comm.timeout == 5


def test_a_sweep_of_the_ablation_has_one_axis(asked):
    arguments = ["experiment=p17_vgg19_22k_10gbe", "cluster.time_dilation=4", "tracking.mlflow=false"]
    assert cli.main(["train", "-m", *arguments, "comm=caffe_ps,wfbp,poseidon,ddp", "hydra.sweep.dir=sweep"]) == 0
    assert [(call.config.comm.name.value, call.config.comm.overlap.value) for call in asked] == [
        ("ps", "none"),
        ("ps", "backward"),
        ("hybrid", "backward"),
        ("ddp", "backward"),
    ]
