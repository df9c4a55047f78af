"""Emulated experiments of the papers beside what they published, and their report as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest

from poseidon.reporting.emulated import bandwidth
from poseidon.reporting.published import load, on_links
from poseidon.reporting.seconds import rows as seconds_rows
from poseidon.reporting.sections import Section, sections
from poseidon.reporting.tables import run_rows, summary_rows, write_csv
from tests.reporting.conftest import Made, as_run, make_in
from tests.reporting.fakes import Fake, fake, p17


def of(*fakes: Fake) -> list[Section]:
    return sections([as_run(one) for one in fakes])


def theirs(section: Section) -> list[Any]:
    return on_links(load().of("vgg19_22k", 32, 21841), bandwidth(section.links or section.first))[0]


def test_the_published_seconds_stand_beside_ours() -> None:
    (section,) = of(
        p17("single", 1, 0.925),
        p17("ps", 8, 3.425 * 1.1, "none"),
        p17("ps", 2, 1.04),
        p17("hybrid", 1, 0.935),
        p17("hybrid", 8, 0.97 / 2, cpu_bound=True),
        p17("hybrid", 3, 1.0),  # not published
        p17("ddp", 2, 1.0),
    )
    found = seconds_rows(section, theirs(section))
    told = [(row["published"], row["nodes"], round(row["ratio"], 3)) for row in found]
    assert told == [
        ("P17 one machine", 1, 1.0),
        ("P17 Poseidon on Caffe", 1, 1.0),
        ("P17 Poseidon on Caffe", 8, 0.5),
        ("P17 Caffe+WFBP", 2, 1.0),
        ("P17 Caffe+PS", 8, 1.1),
    ]
    assert [bool(row["no_test"]) for row in found] == [True, True, False, False, False]  # what the profile was made of
    assert found[2]["limits"] == "CPU"
    assert {row["source"] for row in found} == {"published"}


def test_seconds_of_other_hardware_or_links_are_no_ratio() -> None:
    (section,) = of(p17("hybrid", 8, 1.0, hardware="k20"))
    assert seconds_rows(section, theirs(section)) == []
    (section,) = of(p17("hybrid", 8, 1.0, link="10gbit"))
    assert seconds_rows(section, theirs(section)) == []


@pytest.mark.parametrize(
    ("changes", "links"),
    [
        ({}, {"40 GbE"}),
        ({"link": "10gbit"}, {"10 GbE"}),
        ({"link": "2gbit"}, set()),
        ({"link": None}, set()),
        ({"emulated_costs": ["layers"], "cluster": "local"}, set()),
    ],
)
def test_published_curves_of_other_links_are_not_drawn(changes: dict[str, Any], links: set[str]) -> None:
    (section,) = of(p17("hybrid", 8, 1.0, **changes))
    assert {curve.link for curve in theirs(section)} == links


def test_p17_s_seconds_were_read_in_the_paper() -> None:
    found = {c.comm: c for c in load().of("vgg19_22k", 32, 21841) if c.seconds}
    assert set(found) == {"caffe_ps", "wfbp", "poseidon"}
    assert {c.trust for c in found.values()} == {"V"}
    assert all(list(c.seconds) == [1, 2, 4, 8, 16, 32] for c in found.values())
    assert found["caffe_ps"].seconds[8] == 3.425
    assert {(c.bandwidth, c.baseline_seconds) for c in found.values()} == {(40e9, 0.925)}


@pytest.fixture(scope="module")
def made(store: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_in(tmp_path_factory.mktemp("emulated"), store, "theirs emulated")


def test_the_page_has_a_figure_for_each_link(made: Made) -> None:
    names = sorted(path.name for path in (made.folder / "figures").glob("*-speedup.svg"))
    start = "vgg19_22k-on-synthetic-32-titan_x"
    assert names == [f"{start}-2-gbit-s-speedup.svg", f"{start}-40-gbit-s-speedup.svg"]
    data = {path.name for path in (made.folder / "data").iterdir()}
    assert {f"{start}-40-gbit-s-dilation.csv", f"{start}-40-gbit-s-seconds.csv"} <= data
    assert f"{start}-2-gbit-s-seconds.csv" not in data


def test_the_page_tells_costs_dilation_and_ratios(made: Made) -> None:
    text = unescape(re.sub(r'src="[^"]+"', "", made.page))
    assert "derived: fitted" in text
    assert "<li>none</li>" in text  # of the real run
    assert "All curves, speedups and measurements of this section are of runs at f = 8" in text
    assert ">0.9300<" in text  # A of two nodes
    assert ">1.0900<" in text  # A + B
    assert ">-6.4%<" in text
    assert ">no<" in text
    assert "40 GbE: published" in text
    assert "not drawn, as their links are not those here (2 Gbit/s)" in text
    assert "Where they depart:" in text
    assert "<li>Caffe+PS: the fit took copies, sums and copies one after the other" in text
    assert "Poseidon: hybrid" in made.printed
    assert (
        "Caffe+PS: comm=ps comm.overlap=none; +WFBP/DWBP: comm=ps comm.overlap=backward; Poseidon: comm=hybrid" in text
    )
    assert "None" not in text


def test_every_file_that_the_page_names_is_there(made: Made) -> None:
    links = [link for link in re.findall(r'href="([^"]+)"', made.page) if not link.startswith("#")]
    assert len(links) > 20
    assert [link for link in links if not (made.folder / link).is_file()] == []


def test_a_missing_baseline_is_asked_for_at_the_curves_dilation(report: Callable[..., Made]) -> None:
    made = report("theirs without baseline")
    commands = [unescape(command) for command in re.findall(r"<pre>(.*?)</pre>", made.page)]
    (baseline,) = [command for command in commands if "comm=single" in command]
    assert "cluster.time_dilation=8" in baseline
    assert "auto" not in baseline
    assert "P17 Poseidon on Caffe" in made.page  # seconds need no baseline


def test_records_of_real_runs_alone_say_nothing_of_emulation() -> None:
    (section,) = of(fake("single"), fake(emulated_costs=[], hardware=None, time_dilation=1.0, cpu_bound=True))
    rows_ = summary_rows([section])
    assert not {"hardware", "link", "time_dilation", "cpu_bound"} & set(rows_[0])
    assert "time_dilation" not in write_csv(run_rows(section.runs))
    assert "link" not in section.facts
