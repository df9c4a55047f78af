"""A mistake is one line that names the key and what it accepts; nothing starts and no folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon import cli

SLOW = ["cluster=emulated", "cluster.straggler.delay=100ms"]
MISTAKES = [
    # unknown names
    (["model=lenett"], ["model=lenett", "did you mean lenet?", "alexnet, alexnet_22k, cifar10_quick"]),
    (["cluster="], ["cluster=", "cluster is emulated or local"]),
    (["experiment=lenet_mnits"], ["did you mean lenet_mnist?"]),
    (["modell=lenet"], ["modell: there is no such key", "did you mean model?"]),
    (["trainer.epoch=3"], ["trainer.epoch: there is no such key", "did you mean trainer.epochs?"]),
    (["+trainer.foo=1"], ["trainer.foo: there is no such key"]),
    (["optimizer.momentun=0.5"], ["did you mean optimizer.momentum?", "+optimizer.momentun=0.5"]),
    (["hydra.run.dirr=x"], ["hydra.run.dirr", "did you mean hydra.run.dir?"]),
    # values
    (["comm.overlap=nothing"], ["comm.overlap=nothing: must be none, backward or full"]),
    (["comm.encryption=tls"], ["comm.encryption=tls: must be curve, none or null"]),
    (["device=gpu"], ["device=gpu: must be auto, cpu or cuda"]),
    (["trainer.epochs=many"], ["trainer.epochs=many: must be a number or null"]),
    (["cluster.nodes=2.5"], ["cluster.nodes=2.5: must be a whole number"]),
    (["trainer.trace=[0]"], ["trainer.trace=[0]", "counted from 1"]),
    (["trainer.trace=[-1,2]"], ["trainer.trace=[-1,2]", "there is none -1"]),
    (
        ["trainer.trace=[4]", "trainer.iterations=3"],
        ["trainer.trace=[4]: there is no iteration 4, the run ends with 3"],
    ),
    (["cluster.nodes=0"], ["cluster.nodes=0: must be at least 1"]),
    (["cluster.batch_shares=[1,2,3]"], ["cluster.batch_shares=[1.0, 2.0, 3.0]", "each of the 2 nodes"]),
    (["cluster.batch_shares=[1,-1]"], ["cluster.batch_shares", "must be a positive number"]),
    (["cluster.batch_shares=[1000,1]"], ["cluster.batch_shares", "leaves node 1 no row"]),
    (["cluster.batch_shares=2"], ["cluster.batch_shares"]),
    (["cluster.batch_shares=[63,1]", "cluster.devices_per_node=2"], ["leaves node 1 1 row of", "each of its devices"]),
    (["cluster.servers=0"], ["cluster.servers=0", "at least 1"]),
    (["cluster.servers=[2]"], ["cluster.servers=[2]", "from 0 to 1"]),
    (["cluster.servers=[]"], ["cluster.servers=[]", "from 0 to 1"]),
    (["cluster.servers=two"], ["cluster.servers=two", "number of nodes"]),
    (["cluster.servers=1", "comm=ddp"], ["cluster.servers=1", "comm=ddp has no parameter server"]),
    (["cluster.devices_per_node=0"], ["cluster.devices_per_node=0", "at least 1"]),
    (["cluster.devices_per_node=33"], ["trainer.batch_size=32", "cluster.devices_per_node=33 devices need one each"]),
    (["cluster=emulated", "cluster.bandwidth=10gb"], ["cluster.bandwidth=10gb: must be a rate in kbit, mbit or gbit"]),
    (["cluster=emulated", "cluster.latency=5"], ["cluster.latency=5: must be a time in us, ms or s"]),
    (["cluster=emulated", "+cluster.node_bandwidth.2=1gbit"], ["cluster.node_bandwidth.2: there are nodes 0 to 1"]),
    (["cluster=emulated", "+cluster.node_bandwidth.1=1"], ["cluster.node_bandwidth.1=1: must be a rate"]),
    (["cluster=emulated", "cluster.straggler.delay=5"], ["cluster.straggler.delay=5: must be a time in us, ms or s"]),
    (
        [*SLOW, "cluster.straggler.probability=0"],
        ["cluster.straggler.probability=0.0:", "greater than 0 and at most 1"],
    ),
    ([*SLOW, "cluster.straggler.probability=10"], ["cluster.straggler.probability=10.0:", "at most 1"]),
    ([*SLOW, "cluster.straggler.node=2"], ["cluster.straggler.node=2: there are worker nodes 0 to 1"]),
    ([*SLOW, "cluster.servers=2", "cluster.straggler.node=3"], ["there are worker nodes 0 to 1"]),
    (["cluster=emulated", "cluster.straggler.nodes=2"], ["cluster.straggler.nodes", "did you mean"]),
    (["cluster=emulated", "cluster.time_dilation=0.5"], ["cluster.time_dilation=0.5: must be", "at least 1"]),
    (["trainer.batch_size=-1"], ["trainer.batch_size=-1: must be at least 1"]),
    (["trainer.epochs=0"], ["trainer.epochs=0", "greater than 0"]),
    (["comm.timeout=.inf"], ["comm.timeout"]),
    (["comm.kv_bytes=5"], ["comm.kv_bytes=5: must be at least 1024"]),
    (["comm.kv_bytes=1000000000"], ["comm.kv_bytes=1000000000: must be at most"]),
    (["trainer.target_accuracy=97"], ["trainer.target_accuracy", "write 0.97"]),
    (["optimizer.lr=fast"], ["optimizer.lr=fast: must be a number"]),
    (["optimizer.lr=-1"], ["optimizer.lr=-1: must be a number, at least 0"]),
    (["dataset.shape=3"], ["dataset.shape=3: must be a list"]),
    (["dataset.num_classes=0"], ["dataset.num_classes=0"]),
    (["dataset.train_share=2"], ["dataset: train_share=2"]),
    (["dataset=synthetic", "dataset.size=0"], ["dataset: size=0"]),
    (["schedule=step", "schedule.interval=week"], ["schedule.interval=week: must be epoch or iteration"]),
    # what belongs together
    (["trainer.global_batch=64"], ["trainer.global_batch=64: is for comm=single only"]),
    (["cluster.bandwidth=1gbit"], ["cluster.bandwidth=1gbit: is for cluster=emulated only"]),
    (["cluster.straggler.delay=1s"], ["cluster.straggler.delay=1s: is for cluster=emulated only"]),
    (["cluster.straggler.node=0"], ["cluster.straggler.node=0: is for cluster=emulated only"]),
    (["cluster=emulated", "cluster.straggler.node=0"], ["cluster.straggler.node=0: does nothing without", ".delay"]),
    (["cluster=emulated", "cluster.straggler.probability=0.5"], ["cluster.straggler.probability=0.5: does nothing"]),
    (["cluster=emulated", "cluster.time_dilation=fast"], ["cluster.time_dilation=fast: must be a number", "or auto"]),
    (["cluster=emulated", "cluster.time_dilation=true"], ["cluster.time_dilation=True: must be a number"]),
    (["cluster.time_dilation=auto"], ["cluster.time_dilation=auto: is for cluster=emulated only"]),
    (["cluster.time_dilation=2"], ["cluster.time_dilation=2.0: is for cluster=emulated only"]),
    (["cluster=emulated", "cluster.time_dilation=4"], ["cluster.time_dilation=4.0: real computing cannot be dilated"]),
    (["cluster=emulated", "device=auto"], ["device=auto: with cluster=emulated", "leave device at cpu"]),
    (["trainer.epochs=null"], ["trainer.epochs and trainer.iterations are both null"]),
    (["trainer.accumulate=33"], ["trainer.accumulate=33: must be at most trainer.batch_size=32"]),
    (["comm=ddp", "comm.overlap=none"], ["comm.overlap=none: comm=ddp always overlaps"]),
    (["comm=fsdp", "comm.overlap=none"], ["comm.overlap=none: comm=fsdp always overlaps"]),
    (["comm=downpour", "comm.overlap=none"], ["comm.overlap=none: comm=downpour sends when the optimizer steps"]),
    (["comm=downpour", "cluster.devices_per_node=2"], ["cluster.devices_per_node=2: comm=downpour has one worker"]),
    (["comm=downpour", "cluster.servers=1"], ["cluster.servers=1: comm=downpour keeps its shards on worker nodes"]),
    (["device=cuda", "comm=downpour"], ["device=cuda: comm=downpour trains on the CPU; take comm=ps"]),
    (["comm=downpour", "comm.staleness=1"], ["comm.staleness=1: comm=downpour has none"]),
    (["comm=ddp", "comm.staleness=1"], ["comm.staleness=1: comm=ddp has none"]),
    (["comm.staleness=-1"], ["comm.staleness=-1: must be at least 0"]),
    (["schedule=cosine", "trainer.epochs=null", "trainer.iterations=9"], ["schedule.T_max: follows trainer.epochs"]),
    (["dataset=digits"], ["model: lenet needs images of at least 15x15", "8x8"]),
    (["trainer.resume=nowhere.pt"], ["trainer.resume: there is no file", "nowhere.pt"]),
    # what needs numbers, where none are computed
    (["hardware=k20", "trainer.resume=x.pt"], ["trainer.resume=x.pt: parameters have no values", "(hardware=k20)"]),
    (["hardware=k20", "model.weights=x.pt"], ["model.weights=x.pt: parameters have no values"]),
    (["hardware=k20", "trainer.target_accuracy=0.9"], ["trainer.target_accuracy=0.9: ", "nothing is learnt"]),
    (["hardware=k20", "trainer.clip_norm=1"], ["trainer.clip_norm=1.0: ", "no values"]),
    (["hardware=k20", "trainer.check_every=3"], ["trainer.check_every=3: ", "compute for real"]),
    (["hardware=k20", "trainer.precision=bf16"], ["trainer.precision=bf16: ", "fp32"]),
    (["hardware=k20", "device=auto"], ["device=auto: ", "nothing is on a GPU"]),
    (["hardware=k20", "comm=ddp", "device=cuda"], ["device=cuda: ", "nothing is on a GPU"]),
    # targets
    (["model=torchvision"], ["model.name has no value"]),
    (["model=torchvision", "model.name=resnet5"], ["model.name=resnet5", "nearest: resnet50"]),
    (["model=torchvision", "model.name=fcn_resnet50"], ["model.name=fcn_resnet50 is no image classifier"]),
    (["~model"], ["model._target_: is not set"]),
    (["optimizer._target_=torch.optim.SDG"], ["module torch.optim has no SDG; did you mean SGD?"]),
    (["optimizer._target_=nopackage.SGD"], ["there is no package nopackage"]),
    (["optimizer._target_=torch.optim"], ["is a module; name the class"]),
    (["optimizer._target_=torch.optim.Adam"], ["optimizer: torch.optim.Adam takes no momentum; it takes lr, betas"]),
    (["+model.widths=[3]"], ["model: poseidon.models.lenet takes no widths; it takes shape, num_classes"]),
    # grammar
    (["comm=[ps,sfb]"], ["comm=[ps,sfb]: takes one choice"]),
    (["comm=[ps,oops]"], ["comm=oops: cannot be loaded"]),
    (["comm=null"], ["comm=null: a group takes the name of one of its choices"]),
    (["cluster.nodes=1,2"], ["cluster.nodes=1,2: several values are a sweep: add -m"]),
    (["lenet"], ["lenet: overrides are written key=value"]),
    (["--fast"], ["unrecognized arguments: --fast"]),
    (["--config-dir", "nowhere"], ["--config-dir: there is no folder", "nowhere"]),
    # any job of a sweep
    (["-m", "comm=ps,sbf"], ["comm=sbf: there is no such choice; did you mean sfb?"]),
    (["-m", "comm=ps,sfb", "trainer.batch_size=8,0"], ["trainer.batch_size=0: must be at least 1"]),
    (["-m", "seed=range(100)", "comm=ps,sfb,hybrid,oops"], ["comm=oops"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_one_line_and_starts_nothing(overrides, words, asked, capfd):
    assert cli.main(["train", *overrides]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("poseidon train: ")
    for word in words:
        assert word in printed.err
    assert asked == []
    assert list(Path.cwd().iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, asked, capfd):
    (tmp_path / "file").touch()
    for arguments in (["hydra.run.dir=file/run"], ["-m", "seed=1,2", "hydra.sweep.dir=file/sweep"]):
        assert cli.main(["train", *arguments]) == 2
        message = capfd.readouterr().err.splitlines()[-1]
        assert "cannot make" in message
        assert arguments[-1].partition("=")[0] in message


def test_a_choice_of_one_s_own_with_a_mistake_names_its_file(tmp_path, asked, capfd):
    (tmp_path / "my" / "trainer").mkdir(parents=True)
    (tmp_path / "my" / "trainer" / "mine.yaml").write_text("epoch: 3\n")
    assert cli.main(["train", "--config-dir", "my", "trainer=mine"]) == 2
    message = capfd.readouterr().err
    assert "trainer.epoch" in message
    assert "trainer/mine.yaml" in message


def test_a_config_file_that_is_no_yaml_is_one_line(tmp_path, asked, capfd):
    (tmp_path / "my" / "model").mkdir(parents=True)
    (tmp_path / "my" / "model" / "mine.yaml").write_text("a: [1\nb: 2\n")
    assert cli.main(["train", "--config-dir", "my", "model=mine"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_the_largest_kv_pair_is_the_transport_s_largest_message():
    from poseidon.config.check import MOST_KV_BYTES
    from poseidon.transport.zeromq import MAX_PAYLOAD

    assert MOST_KV_BYTES == MAX_PAYLOAD
