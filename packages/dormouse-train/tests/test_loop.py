"""The loop in one process: what it writes and when, how it stops, goes on and gives up."""

from __future__ import annotations

import gc
import io
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dormouse_train import loop
from dormouse_train.config import Config, load_config
from dormouse_train.console import Console
from dormouse_train.data import Batches
from dormouse_train.errors import UserError
from dormouse_train.metrics import Metrics, read
from dormouse_train.step import StepResult
from safetensors.torch import load_file

TINY = str(Path(__file__).parent / "tiny.toml")


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    """A tiny configuration whose data are 3000 bytes in the test's folder."""
    words = tmp_path / "words.txt"
    words.write_bytes(np.random.default_rng(0).integers(97, 110, 3000).astype(np.uint8).tobytes())
    return lambda *sets: load_config(TINY, sets, {"data.paths": [str(words)]})


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step}"
    return {
        f"{part}.{k}": v
        for part in ("model", "optimizer")
        for k, v in load_file(folder / f"{part}.safetensors").items()
    }


def faked(**values: object) -> Callable[..., StepResult]:
    """A `train_step` that trains nothing and reports `values`."""
    counts = torch.tensor([[8, 2, 0, 6, 0], [4, 4, 4, 2, 2]])
    result: dict[str, Any] = {
        "loss": 2.0,
        "train_bpb": 2.5,
        "grad_norm": 1.0,
        "skipped": False,
        "expert_counts": counts,
    } | values
    return lambda *_: StepResult(**result)


def test_lines_evaluations_samples_and_checkpoints_come_at_their_cadence(tmp_path, configured) -> None:
    run = new(tmp_path / "run")
    config = configured(
        "log.every=3", "eval.every=4", "checkpoint.every=5", "checkpoint.keep=9", "eval.window_bytes=64"
    )
    result = loop.train(config, run)
    lines = read(run)
    assert [line["step"] for line in lines if "loss" in line] == [1, 3, 6, 8]
    scores = [line for line in lines if "heldout_bpb" in line]
    assert [(line["step"], line["window_bytes"]) for line in scores] == [(4, 64), (8, 150)]
    assert [line["step"] for line in lines] == [1, 3, 4, 6, 8, 8]
    assert {path.name for path in (run / "samples").iterdir()} == {"step-4.txt", "step-8.txt"}
    assert (run / "samples" / "step-8.txt").read_bytes().startswith(b"def ")
    assert len((run / "samples" / "step-8.txt").read_bytes()) == len("def ") + 8
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-5", "step-8"}
    assert (result.exit_code, result.step) == (0, 8)
    assert (result.heldout_bpb, result.window_bytes) == (scores[-1]["heldout_bpb"], 150)
    assert result.baselines is not None
    assert result.baselines.window_bytes == 150


def test_a_step_line_has_the_keys_of_the_schema_and_the_counters(tmp_path, configured) -> None:
    run = new(tmp_path / "run")
    loop.train(configured("train.steps=3"), run)
    line = read(run)[0]
    assert line.keys() >= {
        *("step", "loss", "train_bpb", "lr", "grad_norm", "bytes_per_second", "seconds"),
        *("skipped", "dead_experts", "max_expert_load", "memory_bytes"),
    }
    assert line["counters.kda/forward/bounded"] == 2
    assert line["lr"] == pytest.approx(0.5 * load_config(TINY).train.lr)


def test_speed_load_and_dead_experts_are_what_they_are_called(tmp_path, configured, monkeypatch) -> None:
    clock = iter([0.0, 0.5, 1.0, 1.5, 2.0, 2.25, 3.0, 3.25, 4.0, 4.25])  # two steps of 0.5 s, three of 0.25 s
    monkeypatch.setattr(loop, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(loop, "train_step", faked())
    run, file = new(tmp_path / "run"), io.StringIO()
    loop.train(configured("train.steps=5", "log.every=2", "train.accumulate=3"), run, console=Console(file))
    lines = [line for line in read(run) if "loss" in line]
    nbytes = 2 * 16 * 3
    assert [line["bytes_per_second"] for line in lines] == [nbytes / 0.5, nbytes / 0.5, nbytes / 0.25, nbytes / 0.25]
    assert [line["seconds"] for line in lines] == [0.5, 1.0, 1.5, 1.75]
    assert lines[0]["max_expert_load"] == pytest.approx(8 / (16 / 5))
    assert lines[0]["dead_experts"] == 2
    assert "ETA 0:02" in next(line for line in file.getvalue().splitlines() if line.startswith("step 1/5"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_a_resume_ends_as_if_it_had_not_come(
    tmp_path, configured, monkeypatch, number, code
) -> None:
    config = configured("log.every=1")
    whole, cut = new(tmp_path / "whole"), new(tmp_path / "cut")
    loop.train(config, whole)
    real = loop.train_step

    def stopping(*arguments: Any) -> StepResult:
        if arguments[3] == 4:
            os.kill(os.getpid(), number)
        return real(*arguments)

    monkeypatch.setattr(loop, "train_step", stopping)
    result = loop.train(config, cut)
    assert (result.exit_code, result.step, result.heldout_bpb) == (code, 5, None)
    assert [path.name for path in (cut / "checkpoints").iterdir()] == ["step-5"]
    monkeypatch.setattr(loop, "train_step", real)
    Metrics(cut).write({"step": 6, "loss": 0.0})  # as if it had gone on after the checkpoint
    loop.train(config, cut, resume=True)
    left, right = tensors(whole, 8), tensors(cut, 8)
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    keys = ("step", "loss", "train_bpb", "lr", "grad_norm", "heldout_bpb", "counters.kda/forward/bounded")
    assert [[line.get(k) for k in keys] for line in read(whole)] == [[line.get(k) for k in keys] for line in read(cut)]


@pytest.mark.parametrize("during", ["step", "evaluate", "generate", "measure"])
def test_a_stop_is_not_kept_waiting_and_what_it_cut_off_is_done_on_resume(
    tmp_path, configured, monkeypatch, during
) -> None:
    config = configured("log.every=1", "eval.every=4", "eval.window_bytes=64")
    whole, cut = new(tmp_path / "whole"), new(tmp_path / "cut")
    loop.train(config, whole)
    name = "train_step" if during == "step" else during
    real = getattr(loop, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        if during != "step" or arguments[3] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(loop, name, stopping)
    at = 8 if during == "measure" else 4
    result = loop.train(config, cut)
    assert (result.exit_code, result.step, result.baselines) == (143, at, None)
    assert [path.name for path in (cut / "checkpoints").iterdir()] == [f"step-{at}"]
    scored = [line["step"] for line in read(cut) if "heldout_bpb" in line]
    assert scored == {"step": [], "evaluate": [], "generate": [4], "measure": [4, 8]}[during]
    assert (cut / "samples").exists() is (during == "measure")
    monkeypatch.setattr(loop, name, real)
    ended, uncut = (loop.train(config, each, resume=True) for each in (cut, whole))
    assert replace(ended, run=whole) == uncut
    assert {path.name for path in (cut / "samples").iterdir()} == {"step-4.txt", "step-8.txt"}
    keys = ("step", "loss", "heldout_bpb", "counters.kda/forward/bounded")
    assert [[line.get(k) for k in keys] for line in read(whole)] == [[line.get(k) for k in keys] for line in read(cut)]


@pytest.mark.parametrize("during", ["evaluate", "generate"])
def test_what_kills_an_evaluation_costs_no_step_and_a_resume_evaluates_again(
    tmp_path, configured, monkeypatch, during
) -> None:
    config = configured("log.every=1", "eval.every=4", "eval.window_bytes=64", "checkpoint.every=4")
    whole, cut = new(tmp_path / "whole"), new(tmp_path / "cut")
    loop.train(config, whole)
    real = getattr(loop, during)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, during, killed)
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, cut)
    assert [path.name for path in (cut / "checkpoints").iterdir()] == ["step-4"]
    monkeypatch.setattr(loop, during, real)
    loop.train(config, cut, resume=True)
    left, right = tensors(whole, 8), tensors(cut, 8)
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    keys = ("step", "loss", "heldout_bpb", "counters.kda/forward/bounded", "counters.kda/decode/recurrent")
    assert [[line.get(k) for k in keys] for line in read(whole)] == [[line.get(k) for k in keys] for line in read(cut)]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resume_across_the_end_of_an_epoch_reads_the_batches_of_an_uninterrupted_run(
    tmp_path, configured, monkeypatch, stop
) -> None:
    """Three micro-batches of 16 rows: the 177 windows of the data end within the fourth step."""
    config = configured("train.batch=16", "train.accumulate=3", "train.steps=6", "log.every=1")
    real, read_rows = Batches.at, []
    monkeypatch.setattr(Batches, "at", lambda *a: read_rows.append(real(*a).tobytes()) or real(*a))
    whole, cut = new(tmp_path / "whole"), new(tmp_path / "cut")
    loop.train(config, whole)
    wanted = read_rows.copy()
    read_rows.clear()
    step = loop.train_step

    def stopping(*arguments: Any) -> StepResult:
        if arguments[3] == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    monkeypatch.setattr(loop, "train_step", stopping)
    assert loop.train(config, cut).step == stop
    monkeypatch.setattr(loop, "train_step", step)
    loop.train(config, cut, resume=True)
    assert len(wanted) == 3 * 6
    assert read_rows == wanted
    left, right = tensors(whole, 6), tensors(cut, 6)
    assert all(torch.equal(value, right[name]) for name, value in left.items())


def test_a_model_that_is_not_finite_gives_no_sample_and_the_run_a_sentence(tmp_path, configured) -> None:
    config = configured(
        "train.lr=1e6", "optim.weight_decay=1e6", "train.warmup=0", "eval.every=1", "train.max_skipped=3"
    )
    run, file = new(tmp_path / "run"), io.StringIO()
    with pytest.raises(UserError, match=r"lower train\.lr"):
        loop.train(config, run, console=Console(file))
    assert "the model's logits are not finite" in file.getvalue()


def test_a_stop_before_the_first_step_saves_nothing(tmp_path, configured, monkeypatch) -> None:
    run = new(tmp_path / "run")
    real = loop.Dormouse

    def stopping(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "Dormouse", stopping)
    result = loop.train(configured(), run)
    assert (result.exit_code, result.step) == (130, 0)
    assert not (run / "checkpoints").exists()


def test_a_finished_run_that_is_resumed_reports_again_and_adds_no_line(tmp_path, configured) -> None:
    run = new(tmp_path / "run")
    first = loop.train(configured("train.steps=2"), run)
    lines = read(run)
    assert loop.train(configured("train.steps=2"), run, resume=True) == first
    assert read(run) == lines


def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_sentence(tmp_path, configured, monkeypatch) -> None:
    monkeypatch.setattr(loop, "train_step", faked(loss=float("nan"), skipped=True))
    run = new(tmp_path / "run")
    with pytest.raises(UserError, match=r"not finite in 4 steps in a row, up to step 4, and train\.max_skipped is 3"):
        loop.train(configured("train.max_skipped=3", "log.every=1"), run)
    assert [line["skipped"] for line in read(run)] == [1, 2, 3, 4]
    assert read(run)[0]["loss"] is None


def test_a_step_that_is_not_skipped_starts_the_count_anew(tmp_path, configured, monkeypatch) -> None:
    results = iter([faked(skipped=step % 3 != 2)() for step in range(8)])
    monkeypatch.setattr(loop, "train_step", lambda *_: next(results))
    run = new(tmp_path / "run")
    assert loop.train(configured("train.max_skipped=2"), run).exit_code == 0
    assert read(run)[-2]["skipped"] == 6


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_is_on_again_however_the_run_ended(tmp_path, configured, monkeypatch, fails) -> None:
    states = []

    def noting(*_: object) -> StepResult:
        states.append(gc.isenabled())
        return faked(skipped=fails)()

    monkeypatch.setattr(loop, "train_step", noting)
    try:
        loop.train(configured("train.max_skipped=0"), new(tmp_path / "run"))
    except UserError:
        assert fails
    assert gc.isenabled()
    assert not any(states)


def test_without_a_console_nothing_is_printed(tmp_path, configured, capsys) -> None:
    loop.train(configured("train.steps=1"), new(tmp_path / "run"))
    assert capsys.readouterr() == ("", "")


def test_without_sample_bytes_there_are_no_samples(tmp_path, configured) -> None:
    run = new(tmp_path / "run")
    loop.train(configured("train.steps=1", "eval.sample_bytes=0"), run)
    assert not (run / "samples").exists()


def test_data_too_short_for_a_row_is_a_users_mistake(tmp_path, configured) -> None:
    with pytest.raises(UserError, match=r"train\.seq"):
        loop.train(configured("train.seq=5000"), new(tmp_path / "run"))


def test_a_run_has_its_own_number_of_threads_and_gives_the_callers_back(tmp_path, configured, monkeypatch) -> None:
    before, seen = torch.get_num_threads(), []
    wanted = before + 1
    step = faked()
    monkeypatch.setattr(loop, "train_step", lambda *a: seen.append(torch.get_num_threads()) or step(*a))
    config = configured("train.steps=1", f"train.threads={wanted}", "eval.sample_bytes=0")
    loop.train(config, new(tmp_path / "run"))
    assert seen == [wanted]
    assert torch.get_num_threads() == before
