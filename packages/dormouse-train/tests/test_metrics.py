from __future__ import annotations

from pathlib import Path

import pytest
from dormouse_train.metrics import Metrics, read


def test_a_line_is_flat_json_with_its_step_first(tmp_path: Path):
    Metrics(tmp_path).write({"loss": 1.5, "step": 3, "counters.kda/forward/bounded": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "loss": 1.5, "counters.kda/forward/bounded": 2}\n'


def test_a_number_that_is_not_finite_is_null(tmp_path: Path):
    Metrics(tmp_path).write({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "loss": null, "grad_norm": null}\n'


def test_cutting_back_keeps_the_lines_up_to_the_step(tmp_path: Path):
    metrics = Metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": step / 2})
        metrics.write({"step": step, "heldout_bpb": 2.0, "window_bytes": 10})
    metrics.cut_back(2)
    assert [(line["step"], "loss" in line) for line in read(tmp_path)] == [(1, True), (1, False), (2, True), (2, False)]
    metrics.write({"step": 3, "loss": 9.0})
    assert read(tmp_path)[-1] == {"step": 3, "loss": 9.0}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2, "loss": 0.75}'], ids=["within", "before its end"])
def test_a_line_that_a_killed_process_left_unfinished_is_dropped(tmp_path: Path, torn: str):
    metrics = Metrics(tmp_path)
    metrics.write({"step": 1, "loss": 0.5})
    with metrics.path.open("a") as file:
        file.write(torn)
    assert [line["step"] for line in read(tmp_path)] == [1]
    metrics.cut_back(5)
    metrics.write({"step": 2, "loss": 0.25})
    assert read(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


def test_there_may_be_nothing_to_cut(tmp_path: Path):
    Metrics(tmp_path).cut_back(0)
    assert read(tmp_path) == []


def test_a_line_that_no_run_wrote_is_left_out(tmp_path):
    whole = b'{"step": 1, "train_bpb": 2.0}'
    foreign = [b'{"step": 1, "window_bytes": [1]}', b'{"step": {}}', b"[1]", b"\xff\xfe", b'{"loss": 1}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*foreign, whole, b""]))
    assert read(tmp_path) == [{"step": 1, "train_bpb": 2.0}]
    Metrics(tmp_path).cut_back(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole + b"\n"
