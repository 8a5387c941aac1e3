"""Tables say all of a row and where it is from; the pages show what the kept files say."""

from __future__ import annotations

from pathlib import Path

import pytest
from dormouse_bench.rows import Row, read
from dormouse_bench.tables import markdown

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "apps" / "bench" / "results").glob("*.json"))


def row(**changes) -> Row:
    values = {
        "bench": "experts", "shape": "b1", "phase": "fwd", "implementation": "padded", "ms": 12.3456, "floor_ms": 0.5,
        "peak_extra_bytes": 1234567, "machine": "here", "torch": "2", "triton": "3", "commit": "unknown",
        "date": "2031-01-02",
    }  # fmt: skip
    return Row.model_validate(values | changes)


def test_a_table_has_four_digits_and_one_line_an_origin():
    rows = [row(), row(floor_ms=None, peak_extra_bytes=None), row(machine="there")]
    assert markdown(rows).splitlines() == [
        "| bench | shape | phase | implementation | ms | floor_ms | peak_extra_bytes |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
        "| experts | b1 | fwd | padded | 12.35 | 0.5 | 1,234,567 |",
        "| experts | b1 | fwd | padded | 12.35 |  |  |",
        "| experts | b1 | fwd | padded | 12.35 | 0.5 | 1,234,567 |",
        "",
        "here · torch 2 · triton 3 · commit unknown · 2031-01-02",
        "there · torch 2 · triton 3 · commit unknown · 2031-01-02",
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_page_shows_every_kept_file_as_it_is(path):
    assert any(markdown(read(path)) in page.read_text() for page in (ROOT / "docs").glob("*.md")), path.name
