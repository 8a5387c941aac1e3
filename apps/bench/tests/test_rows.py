"""The schema of results files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dormouse_bench import rows
from dormouse_bench.rows import COLUMNS, Origin, Row, RowsError, origin, read, write
from pydantic import ValidationError

RESULTS = sorted((Path(__file__).parents[1] / "results").glob("*.json"))
GOOD = {
    "bench": "experts", "shape": "b1-zipf", "phase": "fwd+bwd", "implementation": "padded",
    "ms": 10.5, "floor_ms": None, "peak_extra_bytes": 3, "machine": "a machine", "torch": "2.13.0+cu130",
    "triton": "3.7.1", "commit": "0123456789ab-dirty", "date": "2031-01-02",
}  # fmt: skip


def test_a_row_is_flat_and_has_the_columns_that_others_build_on():
    assert tuple(GOOD) == COLUMNS
    assert set(Row.model_fields) == set(COLUMNS)
    assert set(Origin.model_fields) == {"machine", "torch", "triton", "commit", "date"}


def test_the_schema_page_lists_the_columns_in_their_order():
    section = (Path(__file__).parents[3] / "docs" / "schemas.md").read_text().split("## Bench rows")[1]
    keys = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert tuple(name.strip(" `") for key in keys for name in key.split(",")) == COLUMNS


def test_rows_survive_a_file_in_order_and_one_a_line(tmp_path):
    rows = [Row.model_validate(GOOD), Row.model_validate(GOOD | {"shape": "qwen3", "floor_ms": 1.25})]
    write(tmp_path / "new" / "rows.json", rows)
    text = (tmp_path / "new" / "rows.json").read_text()
    assert read(tmp_path / "new" / "rows.json") == rows
    assert [tuple(row) for row in json.loads(text)] == [COLUMNS, COLUMNS]
    assert len(text.splitlines()) == 2 + len(rows)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.json"]


@pytest.mark.parametrize(
    "fault",
    [
        {"ms": 0.0},
        {"ms": float("nan")},
        {"floor_ms": -1.0},
        {"peak_extra_bytes": -1},
        {"commit": "main"},
        {"date": "yesterday"},
        {"machine": ""},
        {"shape": "B1 zipf"},
        {"gpu": "H200"},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_faulty_row_is_refused(fault):
    with pytest.raises(ValidationError):
        Row.model_validate(GOOD | fault)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_row_without_one_of_its_columns_is_refused(column):
    with pytest.raises(ValidationError, match=column):
        Row.model_validate({name: value for name, value in GOOD.items() if name != column})


def test_a_file_that_holds_no_rows_is_refused_by_name_and_place(tmp_path):
    path = tmp_path / "rows.json"
    with pytest.raises(RowsError, match=r"rows\.json cannot be read"):
        read(path)
    path.write_text(json.dumps([GOOD, GOOD | {"ms": "fast"}]))
    with pytest.raises(RowsError, match=r"rows\.json is not a results file: 1\.ms"):
        read(path)


def test_origin_names_this_machine_and_stack():
    import torch

    here = origin("cpu")
    assert here.torch == torch.__version__
    assert f"{torch.get_num_threads()} threads" in here.machine


def test_a_tree_without_git_is_told_its_commit(monkeypatch):
    monkeypatch.setattr(rows, "_commit", lambda: "unknown")
    assert origin("cpu", "0123456789ab").commit == "0123456789ab"
    with pytest.raises(ValueError, match="first twelve hexadecimal digits"):
        origin("cpu", "0123456789AB")


def test_git_is_believed_before_the_option(monkeypatch):
    monkeypatch.setattr(rows, "_commit", lambda: "0123456789ab-dirty")
    with pytest.raises(ValueError, match="git says 0123456789ab-dirty"):
        origin("cpu", "0123456789ab")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_results_file_kept_here_is_valid_and_of_a_committed_tree(path):
    rows = read(path)
    assert rows
    assert not [row for row in rows if row.commit == "unknown" or row.commit.endswith("-dirty")]


def test_results_are_kept():
    assert RESULTS
