"""Where hybrid pays: gains over DDP against rows, as simulated for the experiments that ask."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from poseidon import cli
from poseidon.config.compose import compose
from poseidon.reporting.gain import Gain, gains, last_rows
from poseidon.training.simulate import make_simulation

#: Bytes of all-PS / of the cheapest way of each linear layer, by nodes and K, of linear layers alone.
SMALL = {(2, 64): 9.0, (4, 64): 4.5, (8, 64): 2.25, (8, 128): 1.27, (2, 512): 1.16, (2, 1024): 1.0}


def simulated(experiment: str, *more: str) -> list[Gain]:
    overrides = [f"experiment={experiment}", "simulate.nodes=[2,4,8]", "simulate.comms=[ddp,hybrid]", *more]
    return gains(make_simulation(compose("simulate", overrides)).cells)


def test_a_decoder_s_linear_layers_gain_what_arithmetic_says() -> None:
    found = {(g.nodes, g.rows): g for g in simulated("lm_finetune", "simulate.batch_sizes=[1,2,8,16]")}
    for cell, ratio in SMALL.items():
        assert found[cell].least == pytest.approx(ratio, rel=0.03), cell  # norms and biases are in it, too
    assert found[8, 128].bytes < found[8, 128].least  # the papers' rule has no blocks
    assert found[2, 64].speed == pytest.approx(found[2, 64].bytes, rel=0.05)  # the link is all that limits
    assert found[2, 64].speedup < 1  # and one machine needs none
    assert last_rows([gain for gain in found.values() if gain.nodes == 8]) == 128
    assert last_rows([found[2, 1024]]) is None


def test_a_head_gains_less_than_its_own_layer() -> None:
    (two, *_) = simulated("large_head_1m", "simulate.batch_sizes=[64]", "simulate.nodes=[2]")
    assert (two.rows, two.nodes) == (64, 2)
    assert two.bytes == pytest.approx(6.88, rel=0.01)  # 8 of the head alone


def test_table_figure_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model=alexnet", "hardware=k20", "simulate.nodes=[1,2]", "simulate.comms=[ddp,hybrid]"]
    assert cli.main(["simulate", *arguments, "simulate.batch_sizes=[64,16]", f"simulate.folder={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "hybrid leads ddp by 5% or more up to, of those simulated, 2 nodes: K = 64" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gain.png", "gain.svg", "table.csv"]
    assert "nothing is gained" in (tmp_path / "gain.svg").read_text()
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert {(row["rows_per_node"], row["linear_rows"]) for row in rows} == {("16", "16"), ("64", "64")}
    assert cli.main(["simulate", *arguments, "simulate.batch_sizes=[0]"]) == 2
    assert "simulate.batch_sizes=[0]: must be rows per node" in capsys.readouterr().err
