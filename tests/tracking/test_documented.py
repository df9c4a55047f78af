"""docs/records.md names every field of summary.json."""

from pathlib import Path

from poseidon.config.compose import compose
from poseidon.tracking import summary

DOCUMENT = Path(__file__).parents[2] / "docs" / "records.md"


def test_every_field_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").replace("`..._per_rank`", "`cpu_seconds_per_iteration_per_rank`")
    fields = summary.begin(compose("train"), [])
    assert [field for field in fields if f"`{field}`" not in text] == []
