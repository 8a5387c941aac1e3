"""What is drawn of a run and what TensorBoard is given are the numbers of metrics.jsonl, each once."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import dormouse_train
import numpy as np
import pytest
import torch
from dormouse_train import events, plot
from dormouse_train.commands import info
from dormouse_train.errors import UserError
from dormouse_train.metrics import Metrics, read
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

LINES: list[plot.Line] = [
    {"step": 1, "loss": 5.5, "train_bpb": 8.0, "lr": 0.1, "grad_norm": 2.0, "max_expert_load": 3.0, "dead_experts": 1},
    {"step": 2, "loss": None, "lr": 0.2, "grad_norm": 1.0, "max_expert_load": 2.0, "dead_experts": 0},
    {"step": 2, "heldout_bpb": 7.5, "window_bytes": 100},
    {"step": 3, "loss": 4.5, "train_bpb": 6.0, "lr": 0.1, "grad_norm": 1.5, "max_expert_load": 1.5, "dead_experts": 2},
]


def floats(values: object) -> list[float]:
    return np.asarray(values, dtype=float).tolist()


def drawn(figure: Figure) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Of each panel that has curves, each curve's steps and values."""
    return {
        axes.get_title(): {str(c.get_label()): (floats(c.get_xdata()), floats(c.get_ydata())) for c in axes.lines}
        for axes in figure.axes
        if axes.lines
    }


def shown(run: Path) -> Counter[tuple[str, object, float]]:
    """(tag, step, value) of every event of a run, as TensorBoard's own reader finds them."""
    return Counter(
        (value.tag, event.step, value.tensor.float_val[0])
        for file in (run / "events").iterdir()
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    )


def logged(run: Path) -> Counter[tuple[str, object, float]]:
    """The same of metrics.jsonl, whose numbers TensorBoard holds in fp32."""
    return Counter(
        (key.replace("counters.", "counters/", 1), line["step"], float(torch.tensor(float(value))))
        for line in read(run)
        for key, value in line.items()
        if key not in ("step", "window_bytes") and value is not None
    )


@pytest.fixture
def here(command, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """One thread, and the folder with the tiny configuration as the current one."""
    monkeypatch.chdir(command.here)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield command.here
    torch.set_num_threads(threads)


def test_the_curves_are_the_metrics_and_what_is_not_finite_is_a_gap():
    panels = drawn(plot.figure(Figure(), LINES, "run"))
    assert panels["bits a byte"]["held out"] == ([2], [7.5])
    steps, values = panels["loss, nats a byte"]["before the update"]
    assert steps == [1, 2, 3]
    assert (values[0], values[2]) == (5.5, 4.5)
    assert math.isnan(values[1])
    assert panels["expert load"]["experts that no byte chose"] == ([1, 2, 3], [1, 0, 2])
    assert "bytes a second" not in panels


def test_every_key_that_a_run_writes_for_a_panel_is_drawn(finished):
    panels = drawn(plot.figure(Figure(), read(finished[0]), "run"))
    assert {title: list(curves) for title, curves in panels.items()} == {
        title: list(keys.values()) for title, keys in plot.PANELS
    }


def test_info_draws_a_picture(copied: Path, here: Path, capsys: pytest.CaptureFixture[str]):
    assert info.command(copied, Path("run.png")) == 0
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith("picture      run.png\n")


def test_a_picture_that_cannot_be_drawn_is_a_sentence(copied: Path, here: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"run.txt is no picture by its name \(.*png"):
        plot.save(copied, Path("run.txt"))
    (copied / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no metrics yet"):
        plot.save(copied, Path("run.png"))
    Metrics(copied).write({"step": 1, "loss": 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"matplotlib is not installed; .*uv add 'dormouse-train\[plot\]'"):
        plot.save(copied, Path("run.png"))


def test_the_events_of_a_resumed_run_are_its_metrics_each_once(here: Path):
    sets = ["log.tensorboard=true", "eval.sample_bytes=0", "train.steps=4"]
    dormouse_train.train("tiny.toml", run="run", sets=sets, overrides={"data.paths": ["words.txt"]})
    run = Path("run")
    assert shown(run) == logged(run)
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    dormouse_train.train(run=run, resume=True)
    assert shown(run) == logged(run)
    once = Counter((tag, step) for tag, step, _ in shown(run).elements() if tag == "loss")
    assert once == {("loss", step): 1 for step in (1, 2, 3, 4)}


def test_events_asked_for_on_resume_hold_the_whole_run(copied: Path, here: Path):
    assert not (copied / "events").exists()
    dormouse_train.train(run=copied, resume=True, sets=["log.tensorboard=true"])
    assert shown(copied) == logged(copied)


def test_without_tensorboard_the_run_does_not_begin(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tensorboard is not installed; .*uv add 'dormouse-train\[tensorboard\]'"):
        dormouse_train.train("tiny.toml", run="run", sets=["log.tensorboard=true", "data.paths=words.txt"])
    assert not Path("run").exists()
