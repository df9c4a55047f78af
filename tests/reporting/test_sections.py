"""Which runs are repeats, which are curves, which are not compared at all."""

from __future__ import annotations

import pytest

from poseidon.reporting.runs import COMPLETED
from poseidon.reporting.sections import Section, sections
from tests.reporting.conftest import OTHER, as_run
from tests.reporting.fakes import Fake, fake


def of(*fakes: Fake) -> list[Section]:
    return sections([as_run(one) for one in fakes])


def curves(section: Section) -> dict[str, int]:
    return {configuration.variant: len(configuration.runs) for configuration in section.configurations}


def test_only_the_seed_makes_a_repeat():
    (section,) = of(
        *(fake("ps", 2, seed, params={"dataset.seed": str(seed)}) for seed in range(3)),
        fake("ps", 2, params={"optimizer.lr": "0.1", "dataset.seed": "0"}),
    )
    assert curves(section) == {"ps": 3, "ps (lr=0.1)": 1}
    assert section.facts["unless said otherwise"] == "lr=0.02"


def test_overlap_and_rule_are_said_where_they_differ_from_most():
    none = {"comm.overlap": "none"}
    (section,) = of(fake("hybrid"), fake("hybrid", seed=1), fake("hybrid", params=none), fake("ddp", params=none))
    assert curves(section) == {"ddp": 1, "hybrid": 2, "hybrid (overlap=none)": 1}


def test_overlap_is_said_even_where_comm_tells_the_runs_apart():
    (section,) = of(fake("ps", params={"comm.overlap": "none"}), fake("hybrid"))
    assert curves(section) == {"ps (overlap=none)": 1, "hybrid (overlap=backward)": 1}


def test_other_keys_are_said_even_where_comm_tells_the_runs_apart():
    (section,) = of(fake("ps", params={"optimizer.lr": "0.1"}), fake("ps", seed=1), fake("hybrid"))
    assert curves(section) == {"ps": 1, "ps (lr=0.1)": 1, "hybrid": 1}


def test_of_keys_that_change_together_one_is_named():
    changed = {"trainer.epochs": "9", "schedule.T_max": "9"}
    (section,) = of(fake("ps", params={"schedule.T_max": "3"}), fake("ps", params=changed))
    assert sorted(curves(section)) == ["ps (epochs=3)", "ps (epochs=9)"]


def test_what_changes_neither_speed_nor_result_makes_no_curve():
    (section,) = of(
        fake("ps", params={"trainer.log_every": "1", "trainer.checkpoint": "True", "tracking.run_name": "a"}),
        fake("ps", params={"trainer.log_every": "9", "trainer.checkpoint": "False", "tracking.run_name": "b"}),
    )
    assert curves(section) == {"ps": 2}


@pytest.mark.parametrize(
    "other",
    [
        fake(model="mlp"),
        fake(dataset="digits"),
        fake(batch_size=64),
        fake(precision="bf16"),
        fake(threads=2),
        fake(degree="emulated"),
        fake(host=OTHER),
        fake(params={"model.widths": "[1, 2]"}),
    ],
)
def test_what_cannot_be_compared_has_a_section_of_its_own(other):
    first, second = of(fake("single"), other)
    assert len({first.title, second.title}) == 2
    assert len({first.slug, second.slug}) == 2
    (alone,) = [section for section in (first, second) if section.first.comm != "single"]
    assert alone.speedup(alone.configurations[0]) is None


def test_another_host_name_of_the_same_type_is_compared():
    (section,) = of(fake("single"), fake("ps", host={"name": "node1", "cpu": "AMD EPYC", "cores": 8}))
    assert section.speedup(section.configurations[1]).median == 1.0


def test_one_process_with_all_rows_stands_beside_its_equals_but_is_no_baseline():
    (section,) = of(fake("single", rows=64), fake("ps", 2))
    assert section.batch_size == 32
    assert curves(section) == {"single (64 rows)": 1, "ps": 1}
    assert all(section.baseline(configuration) is None for configuration in section.configurations)
    (section,) = of(fake("single", rows=64), fake("ps", 1, batch_size=64))
    assert section.speedup(section.configurations[1]).median == 1.0


def test_a_baseline_with_the_same_settings_is_preferred():
    other = {"optimizer.lr": "0.1"}
    (section,) = of(
        fake("single", speed=100), fake("single", speed=200, params=other), fake("ps", speed=300, params=other)
    )
    ps = section.configurations[-1]
    assert section.speedup(ps).median == 1.5
    assert section.baseline(ps).differs == ()
    (section,) = of(fake("single", speed=100), fake("ps", speed=300, params=other))
    assert section.baseline(section.configurations[-1]).differs == ("optimizer.lr",)


def test_runs_without_a_speed_are_no_baseline():
    (section,) = of(fake("single", speed=None), fake("single", seed=1, speed=200), fake("ps", speed=100))
    assert section.speedup(section.configurations[-1]).median == 0.5


@pytest.mark.parametrize("status", ["failed", "running", "interrupted"])
def test_only_completed_runs_count(status):
    assert of(fake(status=status)) == []
    assert [run.status for section in of(fake(), fake(status=status)) for run in section.runs] == [COMPLETED]


def test_the_order_of_the_runs_does_not_matter():
    fakes = [fake(comm, nodes, seed) for comm in ("ps", "single", "zzz") for nodes in (2, 1) for seed in (1, 0)]
    titles = [
        [(c.variant, c.nodes, [r.whole("seed") for r in c.runs]) for s in of(*order) for c in s.configurations]
        for order in (fakes, fakes[::-1])
    ]
    assert titles[0] == titles[1]
    assert titles[0][0][0] == "single"


def test_devices_and_servers_tell_curves_apart_but_not_baselines():
    more = {"cluster.devices_per_node": "2", "cluster.servers": "1"}
    one = {"cluster.devices_per_node": "1", "cluster.servers": "None"}
    (section,) = of(
        fake("ps", params=one),
        fake("ps", seed=1, params=one),
        fake("ps", params=one | {"cluster.devices_per_node": "2"}),
        fake("single", params=one),
        fake("single", seed=1, params=more),
    )
    assert curves(section) == {"single": 2, "ps": 2, "ps (devices_per_node=2)": 1}
