"""`poseidon simulate`: from a config to seconds, files and words; and beside what emulated runs measured."""

from __future__ import annotations

import copy
import csv
from dataclasses import replace
from pathlib import Path

import pytest

from poseidon import cli
from poseidon.config.compose import compose
from poseidon.config.schema import Comm, SimulateConfig
from poseidon.config.simulated import check_simulate, variants
from poseidon.emulation.fit import Rates, one_node
from poseidon.emulation.layers import LayerTime
from poseidon.errors import UserError
from poseidon.simulation import Job, Network, System, simulate
from poseidon.training.simulate import job_of, make_simulation

SYSTEMS = {
    "caffe_ps": System("ps", "none"),
    "wfbp": System("ps", "backward"),
    "poseidon": System("hybrid"),
    "ddp": System("ddp"),
}
#: docs/emulation.md: seconds per iteration of VGG19-22K on 2, 4 and 8 emulated nodes, by Gbit/s.
EMULATED = {
    40: {
        "caffe_ps": (1.598, 1.600, 1.625),
        "wfbp": (0.983, 0.991, 1.014),
        "poseidon": (0.928, 0.935, 0.948),
        "ddp": (0.942, 0.959, 0.944),
    },
    10: {
        "caffe_ps": (1.746, 2.141, 2.369),
        "wfbp": (1.142, 1.533, 1.785),
        "poseidon": (0.928, 0.935, 0.948),
        "ddp": (1.258, 1.792, 1.832),
    },
    2: {
        "caffe_ps": (4.801, 6.811, 7.917),
        "wfbp": (4.200, 6.213, 7.342),
        "poseidon": (0.930, 0.958, 1.200),
        "ddp": (4.601, 6.209, 7.240),
    },
}


@pytest.fixture(scope="module")
def vgg19_22k() -> Job:
    return job_of(compose("simulate", ["experiment=p17_vgg19_22k"]))


@pytest.mark.parametrize("rate", EMULATED)
def test_emulated_cells_come_out_within_five_percent(vgg19_22k, rate):
    """Of DDP within 16: gloo's threads and sums are software, which takes no time here."""
    for name, measured in EMULATED[rate].items():
        found = [simulate(vgg19_22k, Network(nodes, rate * 1e9), SYSTEMS[name]).seconds for nodes in (2, 4, 8)]
        assert found == pytest.approx(measured, rel=0.16 if name == "ddp" else 0.05), name
        assert all(one <= other * 1.001 for one, other in zip(found, measured, strict=True)), name


def test_one_node_is_what_the_profile_s_rates_were_fitted_with(vgg19_22k):
    """But for Caffe+PS, of which the fit supposes that copies and sums follow one another."""
    job = vgg19_22k
    times = [
        LayerTime(
            layer.name,
            "",
            layer.params,
            32 if layer.product else None,
            None,
            0,
            0,
            forward=layer.forward,
            backward=layer.backward,
        )
        for layer in job.layers
    ]
    shapes = {param.name: param.shape for param in job.params}
    assert job.host_copy
    assert job.server_sum
    rates = Rates(job.host_copy, job.server_sum)
    for system, name in (("wfbp", "wfbp"), ("poseidon", "poseidon")):
        expected = one_node(system, times, job.step, shapes, rates)
        assert simulate(job, Network(1, 1e9), SYSTEMS[name]).seconds == pytest.approx(expected, rel=2e-3), name


def test_bytes_are_those_that_emulated_nodes_counted(vgg19_22k):
    for name, counted in (("caffe_ps", 1603552488), ("poseidon", 197229668)):
        assert simulate(vgg19_22k, Network(8, 1e9), SYSTEMS[name]).bytes_sent == pytest.approx(counted, rel=1e-3)


def test_one_cell_is_printed_and_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", "experiment=p15_alexnet", "cluster.nodes=4", "comm=poseidon"]) == 0
    out, err = capfd.readouterr()
    title, row = out.splitlines()[0], next(line for line in out.splitlines() if "hybrid" in line)
    assert title == "alexnet, 256 rows per node, k20: simulated"
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        *("40gbit", "hybrid", "4", "1.562", "3.69", "1.562", "95.77", "100%", "1%", "the device")
    ]
    assert "one machine: 1.44 s; 1.44 s per iteration of 256 rows (derived: " in out
    assert (err, list(tmp_path.iterdir())) == ("", [])


def test_several_cells_are_a_table_a_figure_and_what_to_emulate(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lists = ["simulate.nodes=[2,1]", "simulate.rates=[10gbit,1gbit]", "simulate.comms=[single,ddp,hybrid+full]"]
    assert cli.main(["simulate", "model=alexnet", "hardware=k20", "trainer.batch_size=256", *lists]) == 0
    out = capfd.readouterr().out
    folder = Path("reports/simulated/alexnet")
    assert sorted(path.name for path in folder.iterdir()) == ["speedup.png", "speedup.svg", "table.csv"]
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["degree"] for row in rows} == {"simulated"}
    assert [(row["link"], row["system"], row["nodes"]) for row in rows] == [
        (link, system, nodes)
        for link in ("1gbit", "10gbit")
        for system, nodes in (("single", "1"), ("ddp", "1"), ("ddp", "2"), ("hybrid+full", "1"), ("hybrid+full", "2"))
    ]
    assert float(rows[0]["speedup"]) == 1
    assert "degree: simulated" in (folder / "speedup.svg").read_text()
    command = next(line for line in out.splitlines() if "poseidon train" in line)
    assert command.split() == [
        *("poseidon", "train", "-m", "model=alexnet", "hardware=k20", "trainer.batch_size=256", "cluster=emulated"),
        *("dataset=synthetic", "cluster.bandwidth=1gbit", "cluster.nodes=2", "comm=single,ddp"),
    ]


@pytest.fixture(scope="module")
def config() -> SimulateConfig:
    return compose("simulate", ["experiment=p17_vgg19_22k", "comm.kv_bytes=65536"])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hardware", None, "^hardware: a simulation needs a profile's times: hardware=titan_x"),
        ("cluster.bandwidth", None, "^cluster.bandwidth=null: a simulated link needs a rate"),
        ("cluster.devices_per_node", 2, "^cluster.devices_per_node=2: is not simulated"),
        ("comm.name", Comm.project_adam, "^comm=project_adam: an owner of layers, who has more to do"),
        ("comm.name", Comm.downpour, "^comm=downpour: going on without waiting is not simulated"),
        ("comm.plan", "plan.json", "^comm.plan=plan.json: recorded plans are not simulated; leave it out"),
        ("comm.staleness", 1, "^comm.staleness=1: is not simulated"),
        ("simulate.rates", ["10"], "^simulate.rates=10: must be a rate in kbit"),
        ("simulate.rates", [], r"^simulate.rates=\[\]: must be rates"),
        ("simulate.nodes", [0], r"^simulate.nodes=\[0\]: must be numbers of nodes"),
        ("simulate.comms", ["posidon"], "^simulate.comms=posidon: did you mean poseidon"),
        ("simulate.comms", ["ddp+full"], r"^simulate.comms=ddp\+full: only ps, sfb, block and hybrid"),
        ("simulate.comms", ["ps+5mib"], r"^simulate.comms=ps\+5mib: only ddp has buckets"),
        ("simulate.comms", [], r"^simulate.comms=\[\]: must be choices"),
        ("simulate.hop", "3", "^simulate.hop=3: must be a time"),
        ("simulate.goodput", 1.1, "^simulate.goodput=1.1: is a share"),
    ],
)
def test_a_mistake_is_one_line(config, key, value, words):
    wrong = copy.deepcopy(config)
    group, _, name = key.rpartition(".")
    setattr(getattr(wrong, group) if group else wrong, name, value)
    with pytest.raises(UserError, match=words):
        check_simulate(wrong)


def test_a_number_for_a_list_is_one_line():
    with pytest.raises(UserError, match=r"^simulate.nodes=8: must be a list, written \[a,b\], or null"):
        compose("simulate", ["simulate.nodes=8"])


def test_a_profile_without_the_model_s_time_is_one_line():
    config = compose("simulate", ["hardware=titan_x", "model=cifar10_quick", "cluster.bandwidth=1gbit"])
    with pytest.raises(UserError, match=r"^hardware=titan_x has no time for model cifar10_quick"):
        make_simulation(config)


def test_systems_are_what_their_choice_of_comm_says(config):
    options = replace(config.simulate, comms=["caffe_ps", "poseidon", "ps+full", "hybrid", "ddp+5mib"])
    found = variants(replace(config, simulate=options))
    assert [(v.name, v.comm.name.value, v.comm.overlap.value, v.comm.kv_bytes) for v in found] == [
        ("caffe_ps", "ps", "none", 65536),
        ("poseidon", "hybrid", "backward", 65536),
        ("ps+full", "ps", "full", 65536),
        ("hybrid", "hybrid", "backward", 65536),
        ("ddp+5mib", "ddp", "backward", 65536),
    ]
    assert [(v.comm.rule.value, v.comm.ddp.bucket_cap_mb) for v in found[1:]] == [
        *(("paper", 25), ("time", 25), ("time", 25), ("time", 5))
    ]


def test_experiments_are_compared_with_the_fastest_ddp(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lists = ["simulate.nodes=[2,8]", "simulate.rates=[40gbit]", "simulate.comms=[hybrid+full,ddp+1mib,ddp+25mib]"]
    assert cli.main(["simulate", "simulate.experiments=[p15_alexnet,p15_cifar10_quick]", *lists]) == 0
    out, err = capfd.readouterr()
    assert (err, out.splitlines()[0].split(";")[0]) == ("", "4 cells")
    folder = Path("reports/simulated/vs_ddp")
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (folder / "table.md").read_text()
    for row in rows:
        same = [r for r in rows if all(r[key] == row[key] for key in ("experiment", "nodes"))]
        best = min((r for r in same if r["comm"] == "ddp"), key=lambda r: float(r["iteration_seconds"]))
        if row["comm"] == "ddp":
            assert row["ratio"] == ""
            continue
        times = float(best["iteration_seconds"]) / float(row["iteration_seconds"])
        assert float(row["ratio"]) == pytest.approx(times)
        assert times >= 1
        assert f"| {row['nodes']} | hybrid+full | " in page
        assert f"| {best['system']} | {float(best['iteration_seconds']):.4g} | {times:.4f} |" in page
    assert f"    poseidon simulate simulate.experiments=[p15_alexnet,p15_cifar10_quick] {' '.join(lists)}" in page
    command = "poseidon train -m experiment=p15_alexnet cluster.bandwidth=40gbit cluster.nodes=2 comm=hybrid,ddp"
    assert command in page


def test_experiments_without_a_ddp_are_one_line(capfd):
    assert cli.main(["simulate", "simulate.experiments=[p15_alexnet]", "simulate.comms=[hybrid]"]) == 2
    assert capfd.readouterr().err.startswith("poseidon simulate: simulate.experiments: compares with DDP")
