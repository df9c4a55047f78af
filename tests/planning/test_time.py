"""comm.rule=time beside what arithmetic allows: AlexNet on 8 nodes, 256 rows each, Titan X (0.25 s alone)."""

from __future__ import annotations

from itertools import product

import pytest

from poseidon.planning import FactorSize, Param, Topology
from poseidon.planning.time import CHOICES, Rates, Timing, _flops, _stage, choose
from poseidon.planning.timeline import Pass, Stage, iteration_seconds

#: Millions of multiplications per image, and parameters.
CONVS = {"conv1": (105.4, 34_944), "conv2": (223.9, 307_456), "conv3": (149.5, 885_120), "conv4": (112.1, 663_936)}
CONVS |= {"conv5": (74.8, 442_624)}
LINEARS = {"fc6": (4096, 9216), "fc7": (4096, 4096), "fc8": (1000, 4096)}
ROWS = 256
ALONE = 0.25


def alexnet() -> tuple[list[Param], dict[str, FactorSize], dict[str, float]]:
    params = [Param(name, name, "Conv2d", (size,), "torch.float32", 4) for name, (_, size) in CONVS.items()]
    params += [Param(name, name, "Linear", shape, "torch.float32", 4, "linear") for name, shape in LINEARS.items()]
    work = {name: flops for name, (flops, _) in CONVS.items()} | {n: a * b / 1e6 for n, (a, b) in LINEARS.items()}
    seconds = {name: flops / sum(work.values()) * ALONE for name, flops in work.items()}
    return params, {name: FactorSize(ROWS, 4) for name in LINEARS}, seconds


def timing(gbit: float) -> Timing:
    """Sums cost nothing, the device multiplies everything."""
    seconds = alexnet()[2]
    rates = Rates(0.957 * gbit * 1e9 / 8, 1e-4, 5e12, shared=True)
    return Timing(rates, {n: s * 2 / 3 for n, s in seconds.items()}, {n: s / 3 for n, s in seconds.items()})


def predicted(plan: dict[str, str], given: Timing, overlap: str, nodes: int = 8) -> float:
    params, sizes, _ = alexnet()
    passes = []
    for param in params:
        scheme = plan.get(param.name, "ps")
        saved = 0.0 if scheme == "ps" else _flops(param, sizes[param.name]) / given.rates.multiply
        stage = _stage(param, scheme, sizes.get(param.name), given.rates, Topology.flat(nodes))
        passes.append(Pass(given.forward[param.name], given.backward[param.name] - saved, stage))
    return iteration_seconds(passes, overlap)


@pytest.mark.parametrize(
    ("gbit", "rule", "by_time"), [(1, 1.6669, 1.6377), (10, 0.2884, 0.2597), (40, 0.2884, 0.2495)], ids=str
)
def test_alexnet_beside_the_ideal(gbit, rule, by_time):
    """At 10 GbE 7.7 x one machine instead of 6.9."""
    params, sizes, _ = alexnet()
    papers = {"fc6": "sfb", "fc7": "sfb", "fc8": "ps"}
    assert predicted(papers, timing(gbit), "full") == pytest.approx(rule, rel=0.03)
    plan = choose(params, sizes, timing(gbit), Topology.flat(8), "full")
    assert predicted(plan, timing(gbit), "full") == pytest.approx(by_time, rel=0.03)


@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("gbit", [1, 10, 40])
def test_no_plan_is_predicted_to_be_faster(gbit, overlap):
    params, sizes, _ = alexnet()
    plan = choose(params, sizes, timing(gbit), Topology.flat(8), overlap)
    every = (dict(zip(LINEARS, each, strict=True)) for each in product(CHOICES, repeat=3))
    least = min(predicted(each, timing(gbit), overlap) for each in every)
    assert predicted(plan, timing(gbit), overlap) == pytest.approx(least, rel=1e-4)


def test_many_layers_are_planned_in_time():
    """A decoder's: 32 linear layers of 4096 x 4096, 2048 rows; where the wire is slow and rows are few, no matrix goes
    whole."""
    params = [Param(f"l{i}", f"l{i}", "Linear", (4096, 4096), "torch.float32", 4, "linear") for i in range(32)]
    seconds = dict.fromkeys((param.name for param in params), 0.01)
    given = Timing(Rates(1e8, 1e-4, 5e12, shared=True), seconds, seconds)
    for rows, scheme in ((2048, "ps"), (16, "sfb")):
        sizes = {param.name: FactorSize(rows, 4) for param in params}
        assert set(choose(params, sizes, given, Topology.flat(4), "backward").values()) == {scheme}


@pytest.mark.parametrize("overlap", ["none", "backward", "full"])
def test_an_iteration_by_hand(overlap):
    """Two layers of 1 + 2 s, 3 s on the link each. Overlapping, the last layer's gradient leaves at 4, the first
    one's at 6. Where the next forward pass begins before all is in, the first one's goes first, and is in at 9."""
    seconds = iteration_seconds([Pass(1.0, 2.0, Stage(3.0))] * 2, overlap)
    assert seconds == pytest.approx({"none": 12, "backward": 10, "full": 9}[overlap], rel=0.01)


def test_a_block_comes_down_after_its_product():
    passes = [Pass(0.0, 1.0, Stage(2.0, 3.0, "host", 4.0, hop=0.5))]
    assert iteration_seconds(passes, "backward") == 1 + 2 + 0.5 + 3 + 4 + 0.5


def test_the_slowest_is_waited_for():
    rates = Rates.least([Rates(4, 1, 9, None, 7), Rates(3, 2, 10, 5, None)])
    assert (rates.link, rates.hop, rates.multiply, rates.add, rates.host) == (3, 2, 9, 5, 7)


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        (Stage(2.0, hop=0.5, copy_out=3.0, copy_in=4.0), 3 + 2 + 0.5 + 4),
        (Stage(2.0, 5.0, "beside", hop=0.5), 5),
        (Stage(7.0, 5.0, "beside", hop=0.5), 7.5),
        (Stage(2.0, 3.0, late=True, copy_in=4.0), 2 + 4 + 3),
    ],
    ids=str,
)
def test_copies_and_sums_by_hand(stage, seconds):
    assert iteration_seconds([Pass(0.0, 1.0, stage)], "backward") == 1 + seconds


@pytest.mark.parametrize(("alone", "scheme"), [(1.0, "sfb"), (0.1, "ps")])
def test_by_measured_rates_a_small_lead_keeps_the_papers_choice(alone, scheme):
    """PS saves 12 ms: of a second that is what measurements are off by, of a tenth it is not. Known rates are exact."""
    params = [Param("fc", "fc", "Linear", (1000, 1000), "torch.float32", 4, "linear")]
    sizes, papers = {"fc": FactorSize(2000, 4)}, {"fc": "sfb"}
    for source, expected in (("measured", scheme), ("profile", "ps")):
        given = Timing(Rates(1e9, 0.0, 1e18, shared=True, source=source), {"fc": alone}, {})
        assert choose(params, sizes, given, Topology.flat(2), "none", papers) == {"fc": expected}
