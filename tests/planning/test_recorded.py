"""Recorded plans: which are taken, and what is said of others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from poseidon.errors import UserError
from poseidon.planning import Param, Topology, read_plan, recorded_plan

PARAMS = (
    Param("conv.weight", "conv", "Conv2d", (8, 3, 3, 3), "torch.float32", 4),
    Param("fc.weight", "fc", "Linear", (10, 8), "torch.float32", 4, "linear"),
    Param("emb.weight", "emb", "Embedding", (30, 8), "torch.float32", 4, "rows"),
)
NAMES = [*(param.name for param in PARAMS), "frozen"]
TWO = Topology.flat(2)


def rows(**schemes: str) -> list[dict[str, Any]]:
    """As a run's plan.json; by layer, what does not go by PS."""
    return [
        {"param": p.name, "shape": list(p.shape), "scheme": schemes.get(p.layer, "ps"), "nodes": [1, 1]} for p in PARAMS
    ]


@pytest.mark.parametrize("scheme", ["ps", "sfb", "block", "adam"])
def test_a_plan_of_this_model_is_taken(scheme):
    found = recorded_plan(rows(fc=scheme, emb="rows"), "f")
    found.check(NAMES, PARAMS, TWO)
    assert found.schemes == {"conv.weight": "ps", "fc.weight": scheme, "emb.weight": "rows"}


def test_what_poseidon_plan_writes_is_taken():
    layers = [{"params": [row["param"]], "shape": row["shape"], "scheme": row["scheme"]} for row in rows(fc="block")]
    found = recorded_plan({"layers": layers, "nodes": 2, "devices_per_node": 1}, "f")
    found.check(NAMES, PARAMS, TWO)
    assert found.schemes["fc.weight"] == "block"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (rows(conv="sfb"), r"plan=f: conv.weight \(Conv2d\) cannot go by sfb; it can by ps$"),
        (rows(emb="block"), r"plan=f: emb.weight \(Embedding\) cannot go by block; it can by ps or rows$"),
        (rows(fc="ring"), "plan=f: ring is no scheme of ours, which are ps, sfb, rows, adam, block$"),
        (rows()[:2], "plan=f is of another model: it has no emb.weight$"),
        ([*rows(), rows()[0] | {"param": "x"}], "plan=f is of another model: this one has no x$"),
        ([row | {"shape": [9]} for row in rows(fc="sfb")], "fc.weight is 9 there, 10 x 8 here$"),
        ([row | {"nodes": [2, 2]} for row in rows()], "was made for 2 nodes of 2 devices, and there are 2 nodes of 1 "),
        ({"layers": []}, "plan=f: is neither a run's plan.json nor"),
        ([], "plan=f: is neither"),
        (3, "plan=f: is neither"),
    ],
    ids=str,
)
def test_others_are_refused_in_one_line(content, words):
    with pytest.raises(UserError, match=words) as error:
        recorded_plan(content, "f").check(NAMES, PARAMS, TWO)
    assert "\n" not in str(error.value)


def test_files(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(UserError, match=f"^plan={path}: cannot be read: No such file"):
        read_plan(str(path))
    path.write_text("{")
    with pytest.raises(UserError, match=f"^plan={path}: is not JSON: "):
        read_plan(str(path))
    path.write_text(json.dumps(rows(fc="sfb")))
    assert read_plan(str(path)).schemes["fc.weight"] == "sfb"
