"""Emulated runs: what may share a figure, and what limits, costs and trust stand beside them."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from poseidon.reporting.bounds import rows
from poseidon.reporting.emulated import bandwidth, basis, link, link_seconds
from poseidon.reporting.figures import speedup
from poseidon.reporting.figures.canvas import style
from poseidon.reporting.provenance import warnings
from poseidon.reporting.sections import Section, sections
from poseidon.reporting.tables import DASH, shown, shown_bounds, summary_rows
from tests.reporting.conftest import as_run
from tests.reporting.fakes import Fake, asleep, fake


def of(*fakes: Fake) -> list[Section]:
    return sections([as_run(one) for one in fakes])


def slow(comm: str = "hybrid", *, comm_keys: dict[str, str] | None = None, **straggler: str) -> Fake:
    """A run on a cluster of which a node is slow."""
    params = {"delay": "null", "probability": "1.0", "node": "null", **straggler}
    one = asleep(comm, params={f"cluster.straggler.{key}": value for key, value in params.items()} | (comm_keys or {}))
    if comm != "single" and params["delay"] != "null":
        one.summary["emulated_costs"].append("straggler")
    return one


@pytest.mark.parametrize(
    "other",
    [
        fake(),  # a real run
        asleep(hardware="k20"),
        asleep(link="1gbit"),
        asleep(link=None),
        asleep(params={"cluster.node_bandwidth.1": "100mbit"}),
        asleep(params={"cluster.latency": "1ms"}),
        slow(delay="100ms"),
        asleep(params={"hardware.host_copy": "1e9"}),
        asleep(params={"hardware.iterations.lenet.seconds": "0.5"}),
        asleep(emulated_costs=["layers"], cluster="local"),
    ],
)
def test_another_hardware_or_link_is_another_section(other: Fake) -> None:
    first, second = of(asleep(), other)
    assert len({first.title, second.title}) == 2
    assert len({first.slug, second.slug}) == 2


@pytest.mark.parametrize(
    "same",
    [
        {"cluster.bandwidth": "10000mbit"},
        {"cluster.bandwidth": "10 Gbit"},
        {"cluster.latency": "0ms"},
        {"cluster.node_bandwidth.1": "10gbit"},
        {"hardware.description": "in other words"},
        {"hardware.sources.host_copy.source": "in other words"},
        {"hardware.iterations.lenet.source": "in other words", "hardware.iterations.lenet.trust": "derived"},
        {"hardware.iterations.alexnet.seconds": "9"},  # another model's
        {"trainer.iterations": "99"},
        {"trainer.epochs": "9", "schedule.T_max": "9"},
    ],
)
def test_what_says_the_same_or_changes_nothing_is_a_repeat(same: dict[str, str]) -> None:
    (section,) = of(asleep("ps"), asleep("ps", 2, 1, params=same))
    assert len(section.configurations) == 1


def test_several_bandwidths_of_one_experiment_share_one_process_as_their_baseline() -> None:
    found = of(asleep("single", speed=100), asleep(speed=150), asleep(speed=120, link="2gbit"))
    assert [section.facts["link"] for section in found] == ["10 Gbit/s", "2 Gbit/s"]
    ours = [section.speedup(section.configurations[-1]) for section in found]
    assert [stat.median if stat else None for stat in ours] == [1.5, 1.2]


def test_one_process_of_other_hardware_or_dilation_is_no_baseline() -> None:
    for single in (asleep("single", hardware="k20"), asleep("single", dilation=2), fake("single")):
        (section,) = [s for s in of(single, asleep(), asleep(nodes=4)) if any(r.comm != "single" for r in s.runs)]
        assert all(section.speedup(configuration) is None for configuration in section.configurations)


def test_a_latency_that_the_kernel_could_not_emulate_is_none() -> None:
    words = ["this kernel has no netem: cluster.latency is not emulated"]
    (section,) = of(asleep(), asleep(nodes=4, params={"cluster.latency": "1ms"}, not_emulated=words))
    assert section.facts["link"] == "10 Gbit/s"
    assert basis(section.runs)[-1] == f"not emulated: {words[0]}"


def test_real_computing_on_emulated_links_is_neither_dilated_nor_named() -> None:
    summary = {"degree": "emulated", "emulated_costs": ["network"], "cluster": "emulated", "time_dilation": 1.0}
    params = {"cluster.bandwidth": "250mbit", "cluster.name": "emulated"}
    (section,) = of(fake("single", params=params, **summary), fake("ps", params=params, **summary))
    assert (section.facts["link"], section.sleeps, section.variants) == ("250 Mbit/s", False, ["single", "ps"])
    assert basis(section.runs) == ["network: a namespace per node, links by tc tbf, 250 Mbit/s each way"]
    assert section.speedup(section.configurations[-1]) is not None


def test_every_kind_of_slow_node_is_a_setting_with_the_same_baseline() -> None:
    found = of(
        slow("single", delay="100ms"),
        slow(delay="100ms"),
        slow(delay="0.1s", node="1"),
        slow(delay="100ms", probability="0.1"),
        slow(),
    )
    assert [section.facts.get("slow node") for section in found] == [
        None,
        "a node, drawn each time, slow by 100 ms in 10 % of iterations",
        "a node, drawn each time, slow by 100 ms in every iteration",
        "node 1 slow by 100 ms in every iteration",
    ]
    assert all(section.speedup(section.configurations[-1]) is not None for section in found)
    assert len({section.slug for section in found}) == 4
    assert not bandwidth(found[-1].runs[-1])  # beside no published curve
    assert "median iteration" in warnings(found)[-1]
    assert basis(found[-1].runs)[-1] == "straggler: node 1 slow by 100 ms in every iteration, before its forward pass"


@pytest.mark.parametrize("same", [{"delay": "0.1s"}, {"delay": "100 ms", "node": "None", "probability": "1"}])
def test_a_slow_node_in_other_words_is_the_same(same: dict[str, str]) -> None:
    (section,) = of(slow(delay="100ms"), slow(**same))
    assert len(section.configurations) == 1
    assert not [key for key in section.keys if key.startswith("cluster.")]


def test_staleness_on_the_same_slow_node_makes_curves() -> None:
    keys = [{"comm.staleness": s} for s in ("0", "1", "1", "3")]
    (section,) = of(*(slow("ps", comm_keys=key, delay="100ms") for key in keys))
    curves = {c.variant.partition(": ")[2]: len(c.runs) for c in section.configurations}
    assert curves == {"ps (staleness=0)": 1, "ps (staleness=1)": 2, "ps (staleness=3)": 1}


@pytest.mark.parametrize("odd", ["quick", "10", "-1gbit", ""])
def test_a_record_with_an_odd_rate_is_no_error(odd: str) -> None:
    assert isinstance(link(as_run(asleep(params={"cluster.bandwidth": odd}))), str)


def test_the_papers_names_of_the_ablation() -> None:
    none = {"comm.overlap": "none"}
    (section,) = of(
        *(asleep(comm) for comm in ("hybrid", "ddp", "ps", "fsdp", "single", "sfb")),
        asleep("ps", params=none),
        asleep("hybrid", params=none),
        asleep("hybrid", params={"comm.rule": "time"}),
    )
    assert section.variants == [
        *("single", "ddp", "fsdp"),
        *("Caffe+PS: ps", "+WFBP/DWBP: ps"),
        "sfb",
        *("Poseidon: hybrid", "hybrid (overlap=none)", "hybrid (rule=time)"),
    ]


def test_real_runs_go_by_their_own_names() -> None:
    (section,) = of(fake("ps", params={"comm.overlap": "none"}), fake("hybrid"))
    assert section.variants == ["ps (overlap=none)", "hybrid (overlap=backward)"]


def drawn(section: Section) -> Figure:
    with style():
        figure = speedup.draw(section, [])
    assert figure is not None
    return figure


def marked(section: Section, marker: str, size: float) -> list[float]:
    """Nodes of the points that have this mark, as far as points stand apart for the eye."""
    lines = [line for line in drawn(section).axes[0].lines if len(line.get_xdata()) == 1]  # type: ignore[arg-type]
    found = [line for line in lines if (line.get_marker(), line.get_markersize()) == (marker, size)]
    return [round(float(line.get_xdata()[0])) for line in found]  # type: ignore[index]


def legend(section: Section) -> list[str]:
    figure = drawn(section)
    found = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [text.get_text() for one in found if one for text in one.get_texts()]


def test_bounded_points_are_marked() -> None:
    (section,) = of(
        asleep("single"),
        asleep(nodes=2, engine_bound=False, cpu_bound=False),
        asleep(nodes=4, engine_bound=True, cpu_bound=False, engine_limit_bits_per_second=7.5e9, cores_per_node=1.25),
        asleep(nodes=8, engine_bound=True, cpu_bound=True),
    )
    assert [c.bounds for c in section.configurations] == [(), (), ("engine",), ("CPU", "engine")]
    table = [shown(row) for row in summary_rows([section])]
    assert [row["limit"] for row in table] == [DASH, DASH, "engine", "CPU, engine"]
    assert (table[2]["engine fills, Gbit/s"], table[2]["cores/node at f=1"]) == ("7.5", "1.25")
    assert (marked(section, "x", 9), marked(section, "o", 14)) == ([8], [4, 8])
    words = " ".join(legend(section))
    assert "cpu_bound" in words
    assert "engine_bound" in words
    assert [row["cpu_bound"] for row in speedup.rows(section, [])] == [False, False, False, True]


def test_what_is_not_there_is_in_no_legend() -> None:
    (section,) = of(asleep("single"), asleep(cpu_bound=False, engine_bound=None))
    assert "bound" not in " ".join(legend(section))


def test_one_bounded_repeat_marks_the_point() -> None:
    (section,) = of(asleep("single"), asleep(), asleep(seed=1, cpu_bound=True))
    assert section.configurations[-1].bounds == ("CPU",)


def test_a_real_run_is_not_marked_for_computing() -> None:
    (section,) = of(fake("single"), fake(cpu_bound=True, engine_bound=True))
    assert section.configurations[-1].bounds == ()
    assert "limit" not in shown(summary_rows([section])[-1])
    assert warnings([section]) == []


def test_warnings_tell_limits_and_what_oversubscribed_means_asleep() -> None:
    told = " ".join(warnings(of(asleep(oversubscribed=True, cpu_bound=True, engine_bound=True))))
    for words in ("cpu_bound", "engine_bound", "Accelerators that sleep"):
        assert words in told
    assert "their speeds say little" not in told


def test_who_computes_is_not_told_to_be_dilated() -> None:
    summary = {"degree": "emulated", "emulated_costs": ["network"], "cluster": "emulated", "time_dilation": 1.0}
    told = " ".join(warnings(of(fake(cpu_bound=True, **summary))))
    assert "cpu_bound" in told
    assert "time_dilation" not in told
    assert "time_dilation" in " ".join(warnings(of(asleep(cpu_bound=True))))


def test_each_emulated_cost_says_what_it_rests_on() -> None:
    lines = dict(line.split(": ", 1) for line in basis([as_run(asleep())]))
    assert list(lines) == ["layers", "reconstruction", "optimizer step", "host_copy", "server_sum", "network"]
    assert "0.925 s per iteration (published: P17)" in lines["layers"]
    assert lines["host_copy"] == "9.79 GB/s each way between device and host (derived: fitted)"
    assert lines["server_sum"].endswith("(unverified: the set-up)")  # the profile's own, for want of better
    assert lines["network"].endswith("links by tc tbf, 10 Gbit/s each way")
    assert "dense" in lines["reconstruction"]


def test_costs_that_a_run_has_not_are_not_claimed() -> None:
    costs = ["layers", "reconstruction", "optimizer step"]
    lines = basis([as_run(asleep(emulated_costs=costs, cluster="local"))])
    assert [line.partition(":")[0] for line in lines] == costs
    assert basis([as_run(fake())]) == []


def test_densities_are_said() -> None:
    params = {"model.density.fc6.u": "0.25", "model.density.fc6.v": "0.36"}
    (line,) = [line for line in basis([as_run(asleep(params=params))]) if line.startswith("reconstruction")]
    assert "as sparse as model.density says" in line


def test_an_iteration_stands_beside_what_each_part_has_to_do() -> None:
    busy = {"device": 0.95, "host_copy": 0.1, "server_sum": 0.6}
    alone = busy | {"host_copy": 0.0, "server_sum": 0.0}
    (section,) = of(
        asleep("single", seconds=0.925, emulated_busy_seconds=alone, bytes_sent_per_iteration=[0.0]),
        asleep("ps", 2, seconds=2.0, emulated_busy_seconds=busy, bytes_sent_per_iteration=[1e9, 2e9]),
        asleep("hybrid", 2, seconds=1.0, emulated_busy_seconds=busy, bytes_sent_per_iteration=[1e8, 1e8]),
        asleep("hybrid", 4, seconds=1.0, emulated_busy_seconds=None),  # of an older version
    )
    single, ps, hybrid = rows(section)
    assert (single["busiest"], single["over_busiest"]) == ("device", pytest.approx(0.925 / 0.95))
    assert (ps["link_seconds"], ps["busiest"], ps["over_busiest"]) == (pytest.approx(1.6), "link", pytest.approx(1.25))
    assert (hybrid["link_seconds"], hybrid["busiest"]) == (pytest.approx(0.08), "device")
    assert shown_bounds(ps)["sums"] == "0.600"


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"params": {"cluster.node_bandwidth.1": "1gbit"}}, 1.6),
        ({"link": None}, None),
        ({"bytes_sent_per_iteration": None}, None),
        ({"server_bytes_sent_per_iteration": None}, 0.8),
        ({"server_bytes_sent_per_iteration": [1e9, 3e9]}, 2.4),
        ({"server_bytes_sent_per_iteration": [3e8], "params": {"cluster.node_bandwidth.2": "1gbit"}}, 2.4),
        ({"bytes_sent_per_iteration": [8e8] * 2, "devices_per_node": 2}, 0.64),
    ],
)
def test_the_link_that_takes_longest(changes: dict[str, Any], seconds: float | None) -> None:
    run = as_run(asleep("ps", 2, **{"bytes_sent_per_iteration": [1e9, 2e8], **changes}))
    assert link_seconds(run) == (None if seconds is None else pytest.approx(seconds))
