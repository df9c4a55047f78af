"""Records as MLflow's params, tags and metrics."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.config import to_plain
from poseidon.config.compose import compose
from poseidon.tracking import content


def test_the_whole_config_is_flattened():
    found = content.params(to_plain(compose("train", ["comm=ps", "trainer.clip_norm=1e-5"])))
    expected = {
        "comm.name": "ps",
        "comm.ddp.bucket_cap_mb": "25.0",
        "cluster.nodes": "2",
        "trainer.clip_norm": "1e-05",
        "trainer.iterations": "null",
        "model.name": "lenet",
        "tracking.mlflow": "true",
    }
    assert {key: found.get(key) for key in expected} == expected


def test_long_values_odd_keys_and_passwords():
    config = {
        "model": {"text": "x" * 9000, "a@b%c": [1, {"d": 2}], "": 1, "k" * 300: 1, "empty": {}},
        "tracking": {"uri": "http://me:secret@host"},
    }
    found = content.params(config)
    assert len(found["model.text"]) == 6000
    assert found["model.a_b_c"] == '[1, {"d": 2}]'
    assert found["model.empty"] == "{}"
    assert found["tracking.uri"] == "http://***@host"
    assert max(map(len, found)) == 250


TEXT = st.text(max_size=8)


@settings(deadline=None)  # the first example imports MLflow
@given(st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.none(), st.dictionaries(TEXT, TEXT)), max_size=4))
def test_mlflow_takes_every_param(config):
    from mlflow.utils.validation import _validate_param

    for key, value in content.params({"model": config}).items():
        _validate_param(key, value)


def test_lines_of_the_metrics_file():
    line = {"iteration": 10, "epoch": 0.5, "wall_s": 1.5, "train_loss": None, "lr": 0.1, "images_per_second": 3}
    assert content.progress(json.dumps(line), 1000) == [
        ("train/lr", 0.1, 2500, 10),
        ("train/epoch", 0.5, 2500, 10),
        ("train/wall_s", 1.5, 2500, 10),
        ("throughput/images_per_second", 3.0, 2500, 10),
    ]
    line = {"iteration": 20, "epoch": 1, "wall_s": 2, "eval_accuracy": None, "eval_loss": 0.5}
    assert {point.key for point in content.progress(json.dumps(line), 0)} == {"eval/loss", "eval/epoch", "eval/wall_s"}
    for broken in ('{"iteration": 3, "tr', "", "[]", '{"train_loss": 1}', '{"iteration": "x"}', "null"):
        assert content.progress(broken, 0) == []
    assert content.progress('{"iteration": 1, "train_loss": NaN, "lr": Infinity, "wall_s": NaN}', 7) == []


def test_the_end_s_figures():
    summary = {
        "iterations": 64,
        "ended": "1970-01-01T00:00:02+00:00",
        "images_per_second": math.inf,
        "iteration_seconds": {"median": 0.03, "p10": 0.02, "p90": None},
        "bytes_sent_per_iteration": [1.0, 3.0, None],
        "bytes_by_scheme": {"sfb": 2.0},
        "seconds_to_target": None,
        "cpu_seconds_per_iteration": [],
    }
    assert content.final(summary) == [
        ("comm/bytes_sent_per_iteration", 3.0, 2000, 64),
        ("throughput/iteration_seconds_median", 0.03, 2000, 64),
        ("throughput/iteration_seconds_p10", 0.02, 2000, 64),
        ("comm/bytes_dense_sfb", 2.0, 2000, 64),
    ]
    assert content.final({}) == []


def test_tags_say_what_is_known():
    summary = {"status": "failed", "error": "e" * 9000, "oversubscribed": True, "host": None, "overrides": ["a=b c"]}
    found = content.tags(summary, "/run")
    assert found["poseidon.kind"] == "run"
    assert found["poseidon.oversubscribed"] == "true"
    assert found["poseidon.run_dir"] == "/run"
    assert found["mlflow.note.content"] == "`poseidon train 'a=b c'`"
    assert len(found["poseidon.error"]) == 5000
    assert "poseidon.cpu" not in found


def test_tags_say_what_is_emulated_and_what_was_the_limit():
    summary = {
        "degree": "emulated",
        "emulated_costs": ["layers", "network"],
        "hardware": "titan_x",
        "time_dilation": 8.0,
        "cpu_bound": False,
        "engine_bound": True,
    }
    cluster = {"cluster": {"bandwidth": "10gbit"}}
    found = content.tags(summary, "/run", cluster)
    expected = {
        "emulated_costs": "layers, network",
        "hardware": "titan_x",
        "bandwidth": "10gbit",
        "time_dilation": "8.0",
        "cpu_bound": "false",
        "engine_bound": "true",
    }
    assert {key: found[f"poseidon.{key}"] for key in expected} == expected
    # A link that nobody emulated says nothing, whatever the config has; before the end no limit is known.
    found = content.tags({"emulated_costs": ["layers"], "cpu_bound": None}, "/run", cluster)
    assert not {"poseidon.bandwidth", "poseidon.cpu_bound"} & set(found)
    assert content.tags({"emulated_costs": []}, "/run", cluster)["poseidon.emulated_costs"] == "none"
    assert "poseidon.emulated_costs" not in content.tags({}, "/run")  # a record from before there were any


def test_names_of_runs():
    summary = {"comm": "hybrid", "nodes": 1, "overrides": ["comm=hybrid", "seed=3", "optimizer.lr=0.1"]}
    assert content.run_name(summary, {}) == "hybrid 1 node"
    assert content.run_name(summary, {}, ["comm", "seed"]) == "hybrid 1 node seed=3"
    assert content.run_name({"comm": "single", "nodes": 1}, {}) == "single"
    named = {"comm": "ps", "nodes": 4, "overrides": ["cluster.nodes=4", "comm=caffe_ps"]}
    assert content.run_name(named, {}, ["comm"]) == "caffe_ps 4 nodes"
    assert content.run_name(summary, {"tracking": {"run_name": "mine\n"}}) == "mine"
    assert len(content.run_name(summary, {"tracking": {"run_name": "x" * 400}})) == 250
