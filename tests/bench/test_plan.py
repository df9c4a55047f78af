"""From cases to runs."""

from __future__ import annotations

import pytest

from poseidon.bench import plan as plans
from poseidon.bench.plan import make_plan
from poseidon.bench.suite import Case, load, names
from poseidon.config.schema import BenchOptions
from poseidon.errors import UserError
from poseidon.training import dilation
from poseidon.training.dilation import Demand

EMULATED = ["experiment=p15_alexnet", "cluster.nodes=2", "cluster.bandwidth=1gbit"]


def case(variants: dict[str, list[str]], *overrides: str, **more) -> Case:
    return Case("a", "a case", variants, overrides or ("model=mlp", "dataset=digits"), **more)


def test_a_variant_is_a_training_with_the_case_s_iterations_and_no_tracking():
    found = make_plan(case({"ps": ["comm=ps"]}, iterations=30, warmup=7)).variants["ps"]
    (run,) = found
    trainer = run.config.trainer
    assert (run.config.comm.name.value, trainer.iterations, trainer.warmup, trainer.epochs) == ("ps", 30, 7, None)
    assert not run.config.tracking.mlflow
    assert run.command.startswith("poseidon train trainer=throughput model=mlp dataset=digits comm=ps")


def test_listed_values_are_alternatives_and_the_same_config_has_the_same_digest():
    found = make_plan(case({"ddp": ["comm=ddp"], "best": ["comm=ddp", "comm.ddp.bucket_cap_mb=1,25"]})).variants
    assert [run.config.comm.ddp.bucket_cap_mb for run in found["best"]] == [1, 25]
    assert [run.digest == found["ddp"][0].digest for run in found["best"]] == [False, True]
    short = found["best"][0].shortened(9)
    assert short.config.trainer.iterations == 9
    assert short.digest != found["best"][0].digest
    assert short.overrides[-1] == "trainer.iterations=9"


def test_all_variants_have_the_time_dilation_of_the_most_demanding(monkeypatch):
    monkeypatch.setattr(
        dilation, "demand", lambda config: Demand("", 4.0 if config.comm.name.value == "ps" else 1.0, 0, 1.0)
    )
    monkeypatch.setattr(dilation, "cores", lambda: 2)
    found = make_plan(case({"ps": ["comm=ps"], "single": ["comm=single"]}, *EMULATED)).in_dilation()
    assert {run.config.cluster.time_dilation for runs in found.variants.values() for run in runs} == {4.0}
    assert "f = 4" in found.picked
    assert all(runs[0].command.endswith("cluster.time_dilation=4") for runs in found.variants.values())


def test_a_mistake_in_a_variant_is_named_before_anything_starts():
    with pytest.raises(UserError, match=r"case a, variant x: comm=sp: there is no such choice"):
        make_plan(case({"x": ["comm=sp"]}))
    with pytest.raises(UserError, match=r"case a, variant x: .*time_dilation"):
        make_plan(case({"x": ["cluster.time_dilation=2"]}))


def test_what_this_machine_cannot_emulate_is_an_obstacle(monkeypatch):
    def lacks():
        raise UserError("cluster=emulated: needs tc")

    monkeypatch.setattr(plans, "find_host", lacks)
    assert make_plan(case({"ps": ["comm=ps"]}, *EMULATED)).obstacle() == "cluster=emulated: needs tc"
    assert make_plan(case({"ps": ["comm=ps"]})).obstacle() is None


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_case_that_is_shipped_can_be_run(name):
    for each in load(BenchOptions(suite=name)).cases:
        assert make_plan(each).in_dilation().variants
