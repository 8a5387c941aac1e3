"""The same runs from Python, in this process."""

from __future__ import annotations

import io
import os
import shutil
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import dormouse_train
import pytest
import torch
from dormouse_model import checkpoint
from dormouse_model.config import ConfigError
from dormouse_train import loop, start
from dormouse_train.checkpoint import Checkpoint
from dormouse_train.commands import evaluate, generate, info
from dormouse_train.config import load_config
from dormouse_train.console import Console
from dormouse_train.errors import UserError
from dormouse_train.metrics import read
from safetensors.torch import load_file

LINE = ("step", "loss", "train_bpb", "lr", "grad_norm", "heldout_bpb", "window_bytes", "skipped")


@pytest.fixture(autouse=True)
def here(command, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """One thread, and the folder with the tiny configuration as the current one."""
    monkeypatch.chdir(command.here)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield command.here
    torch.set_num_threads(threads)


def train(run: str | None = "run", **keys: object):
    overrides = {"data.paths": ["words.txt"], "eval.sample_bytes": 0} | {
        k.replace("_", ".", 1): v for k, v in keys.items()
    }
    return dormouse_train.train("tiny.toml", run=run, overrides=overrides)


class Parts(dict[str, torch.Tensor]):
    """A part that is saved as it is."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self)

    def load_state_dict(self, state_dict: object, /) -> None:
        raise NotImplementedError


def model(run: Path | str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "checkpoints" / f"step-{step}" / "model.safetensors")


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def test_train_returns_the_score_that_the_run_wrote_and_prints_nothing(capsys: pytest.CaptureFixture[str]):
    result = train(train_steps=2)
    assert (result.exit_code, result.step, result.window_bytes) == (0, 2, 649)
    assert read(Path("run"))[-1]["heldout_bpb"] == result.heldout_bpb
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("device", "asked", "experts"),
    [("cpu", None, 16), ("cuda", None, 128), ("cuda", "nano", 16), ("cuda", "tiny.toml", 4)],
)
def test_without_a_name_it_is_nano_on_a_cpu_and_small_on_cuda(device, asked, experts, monkeypatch):
    begun = []
    monkeypatch.setattr(start, "settled", lambda wanted: device)
    ended = loop.Result(0, 1, Path("run"))
    monkeypatch.setattr(start, "_loop", lambda config, *_, **__: begun.append(config) or ended)
    keys = {"data.paths": ["words.txt"], "train.batch": 2, "train.seq": 64, "log.every": 7}
    dormouse_train.train(asked, run="run", overrides=keys)
    (config,) = begun
    assert (config.experts.num_experts, config.train.device, config.log.every) == (experts, device, 7)
    assert load_config("run/config.toml") == config


def test_what_small_could_not_be_is_no_error_of_a_run_on_a_cpu(monkeypatch):
    monkeypatch.setattr(start, "settled", lambda wanted: "cpu")
    ended = loop.Result(0, 1, Path("run"))
    monkeypatch.setattr(start, "_loop", lambda *_, **__: ended)
    keys = {"data.paths": ["words.txt"], "train.batch": 2, "train.seq": 64, "experts.d_ffn": 64}
    dormouse_train.train(run="run", overrides=keys)
    monkeypatch.setattr(start, "settled", lambda wanted: "cuda")
    with pytest.raises(ConfigError, match="shared_rank is 96 but d_ffn 64"):
        dormouse_train.train(run="other", overrides=keys)
    assert not Path("other").exists()


def test_data_too_short_for_the_configuration_that_the_device_chose_leaves_no_folder(monkeypatch):
    monkeypatch.setattr(start, "settled", lambda wanted: "cuda")
    Path("short.txt").write_bytes(b"x" * 400)
    with pytest.raises(UserError, match=r"train\.seq"):
        dormouse_train.train(run="run", overrides={"data.paths": ["short.txt"], "train.batch": 1})
    assert not Path("run").exists()


def test_info_says_what_a_whole_width_leaves_of_equal_parameters(capsys: pytest.CaptureFixture[str]):
    train(train_steps=1, experts_kind="dense")
    capsys.readouterr()
    assert info.command(Path("run")) == 0
    # 4 experts of width w and a shared one of 2 w in place of 24 ranks of 2 * 32 + 37 + 2 numbers and of W_down.
    more = 3 * 32 * 6 * 6 - (24 * 103 + 32 * 37)
    assert f"4 experts of width 6 ({more:+,} parameters beside two-latent experts)" in capsys.readouterr().out


def test_a_configuration_object_trains_like_its_file():
    config = load_config("tiny.toml", [], {"data.paths": ["words.txt"], "train.steps": 2})
    dormouse_train.train(config, run="a")
    train("b", train_steps=2)
    assert_equal(model("a", 2), model("b", 2))
    with pytest.raises(ValueError, match="give a changed Config"):
        dormouse_train.train(config, run="c", sets=["train.steps=3"])


def test_without_a_folder_a_new_one_is_made_and_a_resume_finds_the_newest():
    train(None, train_steps=1)
    train(None, train_steps=1)
    first, second = sorted(Path("runs").iterdir())
    second = second.rename("runs/2000-01-01")
    dormouse_train.train(resume=True, sets=["train.decay_fraction=0.3", "log.every=2"])
    assert load_config(str(second / "config.toml")).log.every == 2
    assert load_config(str(first / "config.toml")).log.every == 1


def test_a_wsd_run_extended_before_its_decay_is_the_longer_run():
    train("short", train_steps=6, train_decay_fraction=0.5)
    train("long", train_steps=10, train_decay_fraction=0.5)
    for step in (4, 5, 6):
        shutil.rmtree(Path("short") / "checkpoints" / f"step-{step}")
    dormouse_train.train(run="short", resume=True, overrides={"train.steps": 10})
    assert_equal(model("short", 10), model("long", 10))
    assert [line["step"] for line in read(Path("short")) if "loss" in line] == list(range(1, 11))
    with pytest.raises(UserError, match="at step 5 as it was, the run is at 10"):
        dormouse_train.train(run="short", resume=True, overrides={"train.steps": 20})


def test_a_cosine_run_cannot_be_extended():
    train("run", train_steps=3, train_schedule="cosine")
    shutil.rmtree(Path("run") / "checkpoints" / "step-3")
    with pytest.raises(UserError, match="only the wsd schedule can change its length"):
        dormouse_train.train(run="run", resume=True, overrides={"train.steps": 9})


def test_a_resume_is_exact_over_epochs_and_with_accumulation(here: Path):
    (here / "words.txt").write_bytes(bytes(range(32, 127)) * 2)  # five windows, twelve rows a step
    for run in ("whole", "cut"):
        train(run, train_batch=3, train_accumulate=4)
    for step in (3, 4, 5, 6):
        shutil.rmtree(Path("cut") / "checkpoints" / f"step-{step}")
    dormouse_train.train(run="cut", resume=True)
    assert_equal(model("cut", 6), model("whole", 6))


# Step 3 is just after an evaluation and a sample; step 0 is a run killed before its first checkpoint.
@pytest.mark.parametrize("step", range(6))
def test_a_resume_from_any_step_ends_like_a_run_without_interruption(copied: Path, finished, step: int):
    for later in range(step + 1, 7):
        shutil.rmtree(copied / "checkpoints" / f"step-{later}")
    dormouse_train.train(run=copied, resume=True)
    assert_equal(model(copied, 6), model(finished[0], 6))
    mine, theirs = ([{k: line.get(k) for k in LINE} for line in read(run)] for run in (copied, finished[0]))
    assert mine == theirs


def test_a_run_may_be_resumed_from_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch):
    train("run", train_steps=2)
    shutil.rmtree(here / "run" / "checkpoints" / "step-2")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert dormouse_train.train(run=here / "run", resume=True).step == 2


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"data_paths": ["none"]}, "does not exist"),
        ({"train_seq": 20_000}, "needs 20001"),
        ({"train_step": 1}, "train.step"),
    ],
)
def test_a_run_that_cannot_begin_leaves_no_folder(keys: dict[str, object], says: str):
    with pytest.raises((UserError, ConfigError), match=says):
        train("run", **keys)
    assert not Path("run").exists()


def test_what_a_killed_start_left_is_cleared_and_never_trained_on():
    run = Path("run")
    (run / "data").mkdir(parents=True)
    (run / ".lock").touch()
    (run / "data" / "train.bin.tmp").write_bytes(b"half of it")
    (run / "data.json").write_text("of other bytes")
    train("run", train_steps=1)
    assert sorted(path.name for path in (run / "data").iterdir()) == ["heldout.bin", "train.bin"]
    assert "words.txt" in (run / "data.json").read_text()


@pytest.mark.parametrize("mine", ["data/notes.txt", "notes.txt"])
def test_a_folder_with_anything_of_the_users_is_not_a_killed_start(mine: str):
    file = Path("run") / mine
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    (Path("run") / ".lock").touch()
    with pytest.raises(UserError, match="is no run and holds other files"):
        train("run")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("there", ["no folder", "an empty folder", "a run of no step"])
def test_a_stop_before_the_first_step_leaves_what_was_there(there: str, monkeypatch: pytest.MonkeyPatch, capfd):
    run, real = Path("run"), loop.Dormouse

    def stopping(*arguments: Any, **options: Any) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    if there != "no folder":
        run.mkdir()
    if there == "a run of no step":
        train("run", train_steps=2)
        shutil.rmtree(run / "checkpoints")
    before = sorted(path.name for path in run.iterdir()) if run.exists() else None
    monkeypatch.setattr(loop, "Dormouse", stopping)
    begun, console = there == "a run of no step", Console(io.StringIO())
    words = {"data.paths": [str(Path("words.txt").absolute())]}
    result = dormouse_train.train(
        None if begun else "tiny.toml", run=run, resume=begun, overrides=words, console=console
    )
    assert (result.exit_code, result.step) == (130, 0)
    assert (sorted(path.name for path in run.iterdir()) if run.exists() else None) == before
    says = "the run is as it was" if begun else "the first step; nothing was kept"
    assert says in capfd.readouterr().err


def test_an_empty_folder_of_the_users_stays_when_a_run_cannot_begin():
    Path("run").mkdir()
    with pytest.raises(UserError, match="does not exist"):
        train("run", data_paths=["none"])
    assert list(Path("run").iterdir()) == []


def test_a_finished_run_resumed_shows_what_it_came_to_and_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    first = train("run", train_steps=2)
    Path("words.txt").unlink()
    for name in ("train", "evaluate", "measure", "Dormouse"):
        monkeypatch.setattr(loop, name, None)
    monkeypatch.setattr(start, "open_corpus", None)
    shown = io.StringIO()
    assert dormouse_train.train(run="run", resume=True, console=Console(shown)) == first
    told = shown.getvalue()
    assert told.startswith("run run is finished, at step 2 of 2; nothing is left to do\nstep 2  held-out ")
    assert f"this model                   {first.heldout_bpb:.3f}" in told
    assert "xz(train+held) - xz(train)" in told


@pytest.mark.parametrize("left", ["no report", "half a report", "another window"])
def test_a_run_whose_end_was_not_reported_as_asked_is_scored_again(left: str):
    first = train("run", train_steps=2)
    report = Path("run") / "report.json"
    kept = report.read_text()
    if left == "no report":
        report.unlink()
    elif left == "half a report":
        report.write_text(kept[:50])
    window = {"eval.final_window_bytes": 300} if left == "another window" else {}
    again = dormouse_train.train(run="run", resume=True, overrides=window)
    assert again.window_bytes == (300 if window else first.window_bytes)
    assert report.read_text() == kept if not window else report.read_text() != kept


def test_other_bytes_are_scored_whole_and_a_seed_repeats_what_is_written(copied: Path, capsysbinary):
    Path("other.txt").write_bytes(bytes(1000))
    evaluate.command(copied, ["other.txt"])
    assert capsysbinary.readouterr().out.endswith(b" BPB over 1,000 bytes (other.txt)\n")
    evaluate.command(copied, ["other.txt"], 300)
    assert capsysbinary.readouterr().out.endswith(b" BPB over 300 bytes (other.txt)\n")
    texts = []
    for seed in (1, 1, 2):
        generate.command(copied, b"the ", 40, temperature=1.5, seed=seed)
        texts.append(capsysbinary.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_eval_of_bytes_that_are_not_there_names_them(copied: Path):
    with pytest.raises(UserError, match=r"nothing.txt does not exist"):
        evaluate.command(copied, ["nothing.txt"])
    with pytest.raises(UserError, match="keeps no bytes for a test"):
        evaluate.command(copied, [], test=True)


def test_eval_reads_rows_by_the_field_of_the_run(copied: Path, capsys: pytest.CaptureFixture[str]):
    Path("rows.jsonl").write_text('{"text": "of a row"}\n{"text": "another"}\n')
    evaluate.command(copied, ["rows.jsonl"])
    assert capsys.readouterr().out.endswith(" BPB over 15 bytes (rows.jsonl)\n")
    config = copied / "config.toml"
    config.write_text(config.read_text().replace('text_field = "text"', 'text_field = "body"'))
    with pytest.raises(UserError, match="no field 'body'"):
        evaluate.command(copied, ["rows.jsonl"])


def test_a_model_that_writes_nothing_finite_is_a_sentence(copied: Path):
    folder = copied / "checkpoints" / "step-6"
    weights = load_file(folder / "model.safetensors")
    Checkpoint(copied).add("model", Parts(weights | {"head.weight": weights["head.weight"] * torch.nan})).save(6)
    with pytest.raises(UserError, match="logits are not finite; load an earlier checkpoint"):
        generate.command(copied, b"x", 3, temperature=1.0, seed=0)


def test_info_of_a_run_in_progress_leaves_out_the_checkpoint_that_has_just_gone(copied: Path, capsys, monkeypatch):
    real = checkpoint.verify

    def going(folder: Path) -> dict[str, object]:
        if folder.name == "step-1":
            shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(checkpoint, "verify", going)
    info.command(copied)
    shown = capsys.readouterr().out
    assert "step 2: whole" in shown
    assert "step 1:" not in shown


def test_info_of_what_is_no_run_says_so():
    for path, says in (("words.txt", "is no folder"), ("none", "does not exist")):
        with pytest.raises(UserError, match=f"RUN: {path} {says}"):
            info.command(Path(path))


def test_eval_of_a_partial_checkpoint_names_it(copied: Path):
    (copied / "checkpoints" / "step-6" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"step-6/model.safetensors is missing"):
        evaluate.command(copied, [])


def test_a_full_device_is_a_sentence_with_the_mend(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore advice.")

    monkeypatch.setattr(loop, "train", full)
    with pytest.raises(UserError, match=r"^train: CUDA out of memory.*2.00 GiB; free memory and go on with --resume"):
        train("run")


@pytest.mark.parametrize("key", ["train.batch", "train.accumulate", "train.seq"])
def test_a_full_memory_tells_a_resume_to_change_nothing_that_it_would_refuse(key, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    train("run", train_steps=1)
    (Path("run") / "report.json").unlink()
    monkeypatch.setattr(loop, "train", full)
    with pytest.raises(UserError) as told:
        dormouse_train.train(run="run", resume=True)
    of_a_resume, _, of_a_new_run = str(told.value).partition("or start a new run with")
    assert "--resume" in of_a_resume
    assert key in of_a_new_run
    with pytest.raises(UserError, match=f"was begun with {key}"):
        dormouse_train.train(run="run", resume=True, sets=[f"{key}=3"])


@pytest.mark.parametrize("resume", [False, True])
def test_the_data_are_opened_once_at_a_start(resume: bool, monkeypatch: pytest.MonkeyPatch):
    if resume:
        train("run", train_steps=1)
        (Path("run") / "report.json").unlink()
    opened = []
    for module in (start, loop):
        real = module.open_corpus
        monkeypatch.setattr(module, "open_corpus", lambda *a, real=real: opened.append(1) or real(*a))
    if resume:
        dormouse_train.train(run="run", resume=True)
    else:
        train("run", train_steps=1)
    assert len(opened) == 1


def test_a_run_that_has_lost_its_manifest_is_refused_and_not_given_another():
    train("run", train_steps=1)
    (Path("run") / "data.json").unlink()
    Path("words.txt").write_bytes(b"other bytes than those it was trained on\n" * 99)
    for again in (lambda: dormouse_train.train(run="run", resume=True), lambda: evaluate.command(Path("run"), [])):
        with pytest.raises(UserError, match=r"run/data.json is missing since the run began; put it back"):
            again()
    assert not (Path("run") / "data.json").exists()


@pytest.mark.parametrize("left", ["nothing", "other words", "a pipe"])
def test_a_run_whose_packs_are_whole_needs_its_source_no_more(left: str):
    train("whole", train_steps=4)
    train("run", train_steps=4, checkpoint_every=2)
    shutil.rmtree(Path("run") / "checkpoints" / "step-4")
    source = Path("words.txt")
    source.unlink()
    if left == "other words":
        source.write_bytes(b"other words" * 99)
    elif left == "a pipe":
        os.mkfifo(source)
    dormouse_train.train(run="run", resume=True)
    assert_equal(model("run", 4), model("whole", 4))
