"""The report as a whole, from an MLflow store to files."""

from __future__ import annotations

import re
import shlex
from html import unescape
from pathlib import Path

import pytest

from poseidon.config.compose import compose
from poseidon.config.schema import Comm
from poseidon.errors import UserError
from tests.reporting.conftest import Made, make_in


def test_the_page_needs_no_other_file_and_no_network(sweep: Made):
    assert "<script" not in sweep.page
    assert "@import" not in sweep.page
    sources = re.findall(r'src="([^"]+)"', sweep.page)
    assert len(sources) == 7  # two hosts: 4 figures, and 3 where there is no baseline
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)


def test_every_link_of_the_page_leads_somewhere(sweep: Made):
    links = re.findall(r'href="([^"]+)"', sweep.page)
    assert len(links) > 20
    for link in links:
        assert f'id="{link[1:]}"' in sweep.page if link.startswith("#") else (sweep.folder / link).is_file()


def test_the_same_runs_give_the_same_bytes(sweep: Made, store: str, tmp_path: Path):
    again = make_in(tmp_path, store, "sweep").folder
    files = sorted(file.relative_to(again) for file in again.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(sweep.folder) for file in sweep.folder.rglob("*") if file.is_file())
    assert {file.suffix for file in files} == {".html", ".png", ".svg", ".csv"}
    for file in files:
        assert (again / file).read_bytes() == (sweep.folder / file).read_bytes(), file


def test_speedups_are_relative_to_the_median_of_one_machine(sweep: Made):
    rows = sweep.rows("lenet-on-mnist5k-32-amd-epyc-8-cores-speedup.csv")
    (hybrid,) = [row for row in rows if row["curve"] == "hybrid" and row["nodes"] == "2"]
    speedup = [float(hybrid[name]) for name in ("speedup_min", "speedup", "speedup_max")]
    assert speedup == pytest.approx([1900 / 1010, 2000 / 1010, 2100 / 1010])
    assert (hybrid["repeats"], hybrid["oversubscribed"], hybrid["source"]) == ("3", "false", "measured")
    assert {row["nodes"]: row["oversubscribed"] for row in rows}["4"] == "true"
    assert "1,010 [1,000..1,020] images/s (median of 3 runs of comm=single)" in sweep.page
    assert "1.98" in sweep.printed


def test_other_hosts_are_never_in_the_same_ratio(sweep: Made):
    assert "The runs come from different hosts; no speedup mixes them." in sweep.page
    assert "lenet on mnist5k, 32 rows per node, Intel Xeon, 4 cores" in sweep.printed
    assert not (sweep.folder / "data" / "lenet-on-mnist5k-32-intel-xeon-4-cores-speedup.csv").exists()


def test_what_did_not_complete_is_listed_and_never_averaged_in(sweep: Made):
    assert "10 completed runs, 4 not averaged in" in sweep.page
    assert "rank 2 died: &lt;killed&gt; &amp; gone" in sweep.page
    assert "still running, or its machine went down" in sweep.page
    assert "its summary.json is missing" in sweep.page
    assert "not averaged in: 4 runs" in sweep.printed
    assert "9000000000" not in (sweep.folder / "data" / "summary.csv").read_text().replace(",", "")


def test_the_csv_of_the_other_figures_is_tidy(sweep: Made):
    stem = "lenet-on-mnist5k-32-amd-epyc-8-cores"
    traffic = sweep.rows(f"{stem}-bytes.csv")
    hybrid = [row for row in traffic if row["curve"] == "hybrid" and row["nodes"] == "2"]
    assert [(row["scheme"], row["source"]) for row in hybrid] == [("ps", "counted"), ("sfb", "counted")]
    assert {row["source"] for row in traffic if row["curve"] == "ddp"} == {"computed"}
    assert {row["nodes"] for row in traffic} == {"2", "4"}
    loss = [row for row in sweep.rows(f"{stem}-loss.csv") if row["curve"] == "single"]
    assert [row["iteration"] for row in loss] == [str(10 * i) for i in range(1, 9)]
    assert all(float(row["train_loss_min"]) <= float(row["train_loss"]) <= float(row["train_loss_max"]) for row in loss)


def test_the_papers_points_stand_beside_their_own_experiment_only(report, sweep: Made):
    made = report("theirs")
    words = (made.folder / "data" / "vgg19_22k-on-synthetic-32-speedup.csv").read_text(encoding="utf-8")
    assert "P17 Poseidon on Caffe, 1 Titan X per node (unverified), 40 GbE: published" in words
    assert "accuracy says nothing" in made.page
    assert "USENIX ATC 2017" in made.page
    assert "USENIX" not in sweep.page


def test_a_missing_baseline_comes_with_the_command_that_makes_it(report):
    made = report("no baseline")
    (command,) = re.findall(r"<pre>(.*?)</pre>", made.page)
    command = unescape(command)
    assert command in made.printed
    program, workflow, *overrides = shlex.split(command)
    assert (program, workflow, overrides.pop(0)) == ("poseidon", "train", "-m")  # as many seeds as the others have
    assert "seed=0,1" in overrides
    config = compose("train", [override for override in overrides if not override.startswith("seed=")])
    assert (config.comm.name, config.trainer.batch_size) == (Comm.single, 16)
    assert config.tracking.experiment == "no baseline"
    assert not any(override.startswith(("comm.", "cluster.", "hydra.", "+tracking")) for override in overrides)


@pytest.mark.parametrize("experiment", ["one", "nothing measured"])
def test_runs_that_tell_little_make_a_report_all_the_same(report, experiment):
    made = report(experiment)
    assert "poseidon train" in made.printed
    assert "nan" not in made.page.lower().partition("<style>")[0]
    assert "None" not in re.sub(r'src="[^"]+"', "", made.page)


@pytest.mark.parametrize(
    ("experiment", "line"),
    [
        (None, "report.experiment has no value: give one, report.experiment=...; "),
        ("nope", "report.experiment=nope: no such experiment; "),
        ("not ours", "report.experiment=not ours: no such experiment; "),
        ("all failed", "report.experiment=all failed: has no completed run (1 failed, 1 running); "),
    ],
)
def test_without_completed_runs_one_line_tells_what_there_is(report, tmp_path, experiment, line):
    with pytest.raises(UserError) as raised:
        report(experiment)
    message = str(raised.value)
    assert message.startswith(line)
    assert "has all failed, no baseline, nothing measured, one, sweep, theirs" in message
    assert "Default" not in message
    assert experiment is None or f"tracking.experiment={experiment}" in message
    assert not (tmp_path / "reports").exists()


def test_an_earlier_report_is_replaced_and_what_else_lies_there_stays(report):
    folder = report("one").folder
    (folder / "figures" / "old.svg").write_text("old")
    (folder / "notes.txt").write_text("mine")
    report("one")
    assert not (folder / "figures" / "old.svg").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_no_report_is_left_alone(report, tmp_path):
    (tmp_path / "reports" / "mine" / "data").mkdir(parents=True)
    (tmp_path / "reports" / "mine" / "data" / "precious.csv").write_text("1")
    with pytest.raises(UserError, match=r"report.name=mine: .* is not empty and holds no report"):
        report("one", name="mine")
    assert (tmp_path / "reports" / "mine" / "data" / "precious.csv").read_text() == "1"


@pytest.mark.parametrize("name", ["..", "a/b", "."])
def test_a_name_that_is_a_path_is_refused(report, name):
    with pytest.raises(UserError, match="must be the name of a folder"):
        report("one", name=name)


def test_a_report_that_cannot_be_written_is_one_line(report, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"report.folder=.*cannot write"):
        report("one", folder=str(tmp_path / "file"))


def test_without_a_store_none_is_made(tmp_path):
    with pytest.raises(UserError, match="there is no run store"):
        make_in(tmp_path, f"sqlite:///{tmp_path}/none.db", "one")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_store_is_one_line(tmp_path):
    (tmp_path / "a.db").write_text("not a database")
    with pytest.raises(UserError, match="cannot use the run store"):
        make_in(tmp_path, f"sqlite:///{tmp_path}/a.db", "one")
