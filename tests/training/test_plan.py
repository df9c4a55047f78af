"""`poseidon plan`: from a config to rows and totals; and what a real run then sends."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poseidon import cli
from poseidon.config.build import build
from poseidon.config.compose import compose
from poseidon.config.schema import Format
from poseidon.engine.parameters import tensors_in
from poseidon.errors import UserError
from poseidon.reporting.plan import render
from poseidon.training.plan import make_plan
from tests.ranks import run_ranks

IMAGENET = ["dataset=synthetic", "dataset.shape=[3,227,227]", "dataset.num_classes=1000"]


def plan(*overrides: str) -> Any:
    return make_plan(compose("plan", overrides))


def test_alexnet_on_8_nodes_beside_the_papers_numbers():
    made = plan("model=alexnet", *IMAGENET, "cluster.nodes=8", "trainer.batch_size=256")
    linear = {row.layer: row for row in made.rows if row.rows}
    assert made.parameters == 60_965_224
    for layer, ps, sfb, scheme in (
        ("fc6", 132.1, 47.7, "sfb"),
        ("fc7", 58.7, 29.4, "sfb"),
        ("fc8", 14.3, 18.3, "ps"),
    ):
        row = linear[layer]
        assert (row.rows, row.scheme) == (256, scheme)
        assert (round(row.floats["ps"] / 1e6, 1), round(row.floats["sfb"] / 1e6, 1)) == (ps, sfb)


def test_the_table_has_three_significant_digits():
    text = render(plan("model=alexnet", *IMAGENET, "cluster.nodes=8", "trainer.batch_size=256"), Format.table)
    row = next(line for line in text.splitlines() if "fc6" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        *("fc6", "Linear", "4096 x 9216", "256", "132", "47.7", "288", "84.9", "sfb")
    ]


def test_json_and_csv_hold_the_whole_numbers():
    made = plan("model=lenet", "cluster.nodes=4")
    content = json.loads(render(made, Format.json))
    rows = list(csv.DictReader(io.StringIO(render(made, Format.csv))))
    assert [row["layer"] for row in rows] == [layer["layer"] for layer in content["layers"]]
    ip1 = next(row for row in rows if row["layer"] == "ip1")
    assert (ip1["shape"], ip1["rows"], float(ip1["floats_ps"])) == ("500x800", "32", 4 * 400_000 * 3 / 4)
    assert content["floats_per_node"]["chosen"] < content["floats_per_node"]["ps"]


def test_all_comms_and_what_cannot_be_planned():
    assert {row.scheme for row in plan("comm=ps").rows} == {"ps"}
    ddp = plan("comm=ddp", "cluster.nodes=4")
    assert ddp.bytes_sent_per_node == 2 * 3 / 4 * 4 * 431_080
    assert {ddp.scheme(row) for row in ddp.rows} == {"ddp"}
    fsdp = plan("comm=fsdp", "cluster.nodes=4")  # 50, 20, 500 and 10 rows: two of them are filled up to 52 and 12
    filled = 2 * (1 + 20 * 25) + 2 * (1 + 500)
    assert fsdp.bytes_sent_per_node == 2 * 3 / 4 * 4 * (431_080 + filled)
    assert {fsdp.scheme(row) for row in fsdp.rows} == {"fsdp"}
    downpour, ps = plan("comm=downpour", "cluster.nodes=4"), plan("comm=ps", "cluster.nodes=4")
    assert downpour.rows == ps.rows
    assert downpour.bytes_sent_per_node == ps.bytes_sent_per_node
    text = ("model=transformer_lm", "model.tied=false", "model.layers=1", "dataset=text", "dataset.num_classes=9999")
    assert {row.scheme for row in plan("comm=ps", *text).rows} == {"ps", "rows"}
    assert {row.scheme for row in plan("comm=downpour", *text).rows} == {"ps"}  # whole slices come back
    assert set(plan("cluster.nodes=1").totals.values()) == {0}
    with pytest.raises(UserError, match="comm=single sends nothing"):
        plan("comm=single")


def test_accumulated_gradients_are_no_factors_and_bf16_halves_them():
    assert {row.rows for row in plan("trainer.accumulate=2").rows} == {None}
    whole, half = plan("comm=sfb"), plan("comm=sfb", "trainer.precision=bf16")
    assert half.bytes_sent_per_node < 0.7 * whole.bytes_sent_per_node


def test_a_model_that_needs_real_numbers_gets_them():
    made = plan("~model", f"+model._target_={__name__}.Asking", "dataset.shape=[6]")
    assert [(row.layer, row.rows) for row in made.rows][:2] == [("inner", 32), ("(biases of the layers with K)", None)]


class Asking(nn.Module):
    """Looks at its numbers, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(x.sum() + 1)


def test_a_data_set_without_a_shape_is_asked_for_rows():
    made = plan(
        "~dataset",
        f"+dataset._target_={__name__}.pairs",
        "~model",
        f"+model._target_={__name__}.Asking",
        "+dataset.n=3",
    )
    assert made.rows[0].rows == 32


def pairs(n: int) -> Any:
    rows = [(torch.ones(6), 0)] * n
    return rows, rows


def test_a_model_that_does_not_fit_the_rows_is_one_line():
    with pytest.raises(UserError, match=r"^model: .*Asking cannot take the data set's rows: .*\(32x7 and 6x6\)"):
        plan("~model", f"+model._target_={__name__}.Asking", "dataset.shape=[7]")


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("model=lenet", "dataset=mnist5k"),
        ("model=mlp", "dataset=digits", "model.widths=[300,200]"),
        ("model=cifar10_quick", "dataset.shape=[3,32,32]"),
        ("model=transformer_lm", "dataset=text"),
    ],
)
def test_a_run_sends_what_was_planned(comm, overrides):
    """Payload within 2 %; in fact exactly."""
    config = compose("plan", [*overrides, f"comm={comm}", "cluster.nodes=3", "trainer.batch_size=8"])
    planned = make_plan(config).bytes_sent_per_node
    torch.manual_seed(0)
    base = build(config.model, key="model")
    dtype = getattr(torch, config.dataset.get("dtype", "float32"))

    def body(session: Any) -> tuple[float, float]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.distribute(model, optimizer, comm=comm)
        for _ in range(3):
            optimizer.zero_grad()
            sum(t.sum() for t in tensors_in(model(torch.zeros(8, *config.dataset["shape"], dtype=dtype)))).backward()
            optimizer.step()
        report = session.report(model)
        return report["bytes_dense_per_iteration"], report["bytes_planned_per_iteration"]

    measured = run_ranks(3, body)
    assert max(dense for dense, _ in measured) == pytest.approx(planned, rel=0.02)
    assert [dense for dense, _ in measured] == [planned for _, planned in measured]


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "model=lenet", "cluster.nodes=4", "trainer.batch_size=32"]) == 0
    assert "ip1" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["plan", "plan.format=json", "plan.output=deep/plan.json"]) == 0
    assert json.loads((tmp_path / "deep" / "plan.json").read_text())["nodes"] == 2
    assert cli.main(["plan", f"plan.output={tmp_path}"]) == 2
    assert cli.main(["plan", "comm=single"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("poseidon plan: plan.output: cannot write")
    assert said[1].startswith("poseidon plan: comm=single sends nothing")


def test_a_plan_sweeps_over_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "-m", "cluster.nodes=2,8"]) == 0
    printed = capsys.readouterr().out
    assert "2 nodes" in printed
    assert "8 nodes" in printed
    assert list(tmp_path.iterdir()) == []
