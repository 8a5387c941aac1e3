"""Whole runs: killed, resumed, stopped, refused; each process is one that a user would start."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from dormouse_model.config import validate
from dormouse_train.config import Config, load_config, to_toml
from dormouse_train.metrics import read
from safetensors.torch import load_file

PARTS = ("model", "optimizer", "rng")
TIMES = {"seconds", "bytes_per_second", "memory_bytes"}


def parts(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step}"
    found = {part: load_file(folder / f"{part}.safetensors") for part in PARTS}
    if (folder / "carried.safetensors").exists():
        found["carried"] = load_file(folder / "carried.safetensors")
    return {f"{part}.{name}": value for part, tensors in found.items() for name, value in tensors.items()}


def assert_same_end(run: Path, other: Path, step: int = 6) -> None:
    """Every tensor, the progress but for its seconds, and every line but for times are equal."""
    mine, theirs = parts(run, step), parts(other, step)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    states = [json.loads((r / "checkpoints" / f"step-{step}" / "state.json").read_text()) for r in (run, other)]
    for state in states:
        del state["progress"]["seconds"]
    assert states[0] == states[1]
    lines = [[{k: v for k, v in line.items() if k not in TIMES} for line in read(r)] for r in (run, other)]
    assert lines[0] == lines[1]


def until(process: subprocess.Popen[str], start: str) -> None:
    """Read the output up to the line that begins with `start`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(f"{start!r} was never printed: {process.stderr.read() if process.stderr else ''}")


def test_a_run_ends_with_its_scores_and_the_files_of_the_schema(finished):
    run, ended = finished
    assert {path.name for path in run.iterdir()} >= {"config.toml", "data.json", "metrics.jsonl", "samples"}
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [f"step-{n}" for n in range(1, 7)]
    assert ended.out.count("step 1/6") == 1
    assert "held-out" in ended.out
    assert "unigram" in ended.out
    assert "xz(train+held) - xz(train)" in ended.out
    lines = read(run)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert all({"loss", "train_bpb", "lr", "grad_norm"} <= line.keys() for line in lines if "loss" in line)
    assert [(line["step"], line["window_bytes"]) for line in lines if "heldout_bpb" in line] == [(3, 256), (6, 649)]


def test_what_was_trained_on_is_the_file_byte_for_byte(finished):
    run, _ = finished
    packed = (run / "data" / "train.bin").read_bytes() + (run / "data" / "heldout.bin").read_bytes()
    assert packed == (run.parent / "words.txt").read_bytes()
    assert b"\r\n" in packed


def test_the_configuration_of_a_run_reads_back_identically(finished):
    run, _ = finished
    text = (run / "config.toml").read_text()
    config = load_config(str(run / "config.toml"))
    assert isinstance(validate(Config, config.model_dump()), Config)
    assert to_toml(config) == text
    assert config.data.paths == (str(run.parent / "words.txt"),)


def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(command, finished):
    rng = random.Random(os.getpid())
    step, delay = rng.randint(1, 5), rng.uniform(0, 0.2)
    print(f"killed {delay:.3f} s after step {step}")
    process = command.start("train", "--config", "tiny.toml", "--data", "words.txt", "--run", "run")
    until(process, f"step {step}/6")
    time.sleep(delay)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    resumed = command("train", "--resume", "--run", "run")
    assert resumed.code == 0, resumed.err
    assert_same_end(command.here / "run", finished[0])


def test_small_is_built_trained_and_resumed_to_the_same_bits(command):
    keys = ("--config", "small", "--data", "words.txt", "--device", "cpu", "--steps", "3", "--set", "train.batch=1")
    keys += ("--set", "train.seq=64", "--set", "checkpoint.every=2", "--set", "eval.sample_bytes=0")
    whole = command("train", *keys, "--run", "whole")
    assert whole.code == 0, whole.err
    assert "tables        sparse" in whole.out
    shutil.copytree(command.here / "whole", command.here / "run")
    shutil.rmtree(command.here / "run" / "checkpoints" / "step-3")
    resumed = command("train", "--resume", "--run", "run")
    assert resumed.code == 0, resumed.err
    assert "going on after step 2" in resumed.out
    assert_same_end(command.here / "run", command.here / "whole", 3)


def test_a_stream_with_a_carried_state_that_is_killed_goes_on_to_the_same_end(command):
    rows = [json.dumps({"text": f"the row {n} of many. " * (1 + n % 9)}) for n in range(120)]
    (command.here / "rows.jsonl").write_text("\n".join(rows))
    keys = ("--config", "tiny.toml", "--data", "rows.jsonl", "--set", "data.order=stream", "--set", "train.carry=tbptt")
    keys += ("--set", "train.seq=128", "--set", "train.segment=64", "--set", "train.accumulate=2")
    whole = command("train", *keys, "--run", "whole")
    assert whole.code == 0, whole.err
    process = command.start("train", *keys, "--run", "run")
    until(process, "step 4/6")
    process.kill()
    process.communicate()
    for left in (4, 5, 6):  # as if it had been killed after step 3, however far it came
        shutil.rmtree(command.here / "run" / "checkpoints" / f"step-{left}", ignore_errors=True)
    resumed = command("train", "--resume", "--run", "run")
    assert resumed.code == 0, resumed.err
    assert "going on after step 3" in resumed.out
    assert_same_end(command.here / "run", command.here / "whole")
    carried = load_file(command.here / "run" / "checkpoints" / "step-6" / "carried.safetensors")
    assert {name: held.shape[:2] for name, held in carried.items()} == {
        "recurrent": (2, 4),
        "tails": (2, 4),
        "engram": (2, 4),
        "last_bytes": (4, 3),
    }
    assert all(held.float().abs().sum() > 0 for held in carried.values())


def test_a_sigterm_saves_the_step_and_a_resume_ends_the_same(command, finished):
    process = command.start(
        *("train", "--config", "tiny.toml", "--data", "words.txt", "--run", "run", "--set", "checkpoint.every=0")
    )
    until(process, "step 2/6")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (143, "")
    assert "stopped and saved at step" in out
    (saved,) = (command.here / "run" / "checkpoints").iterdir()
    assert saved.name in ("step-2", "step-3", "step-4", "step-5")
    resumed = command("train", "--resume", "--run", "run")
    assert resumed.code == 0, resumed.err
    assert f"going on after {saved.name.replace('-', ' ')}" in resumed.out
    assert_same_end(command.here / "run", finished[0])


def test_a_sigint_saves_and_exits_with_130_and_a_second_one_leaves_at_once(command):
    slow = ("--set", "train.seq=8192", "--set", "train.steps=100", "--set", "checkpoint.every=0")
    process = command.start("train", "--config", "tiny.toml", "--data", "words.txt", "--run", "one", *slow)
    until(process, "step 1/100")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    (saved,) = (command.here / "one" / "checkpoints").iterdir()
    assert saved.name in ("step-1", "step-2", "step-3")

    process = command.start("train", "--config", "tiny.toml", "--data", "words.txt", "--run", "two", *slow)
    until(process, "step 1/100")
    time.sleep(0.1)  # into the next step
    while process.poll() is None:  # signals that come while torch computes are delivered as one
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    assert "stopped and saved" not in out


def handles_sigterm(pid: int) -> bool:
    """Whether a process handles SIGTERM, as a command does from its first lines on and Python by itself does not."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("seconds", [0, 0.3, 1.5])
def test_ctrl_c_during_start_up_leaves_with_130_and_no_traceback(command, seconds: float):
    process = command.start("train", "--config", "tiny.toml", "--data", "words.txt", "--run", "run")
    while not handles_sigterm(process.pid):
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err in ("", "stopped before the first step; nothing was kept\n")
    assert (command.here / "run").exists() is ("stopped and saved" in out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_start_interrupted_while_it_reads_the_data_is_begun_anew(command, number: signal.Signals):
    with (command.here / "endless.txt").open("wb") as file:
        file.truncate(2**36)
    run = command.here / "run"
    process = command.start("train", "--config", "tiny.toml", "--data", "endless.txt", "--run", "run")
    while not (run / ".lock").exists():
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert err == ("" if number == signal.SIGKILL else "stopped before the first step; nothing was kept\n")
    if number == signal.SIGKILL:
        assert [path.name for path in run.iterdir()] == [".lock"]
        assert "without --resume" in command("train", "--resume", "--run", "run").sentence
        again = command.train("run", "--steps", "1")
        assert again.code == 0, again.err
    else:
        assert process.returncode == 128 + number
        assert not run.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--set", "train.lr=0.5"], "train.lr = 0.02 (now 0.5)"),
        (["--seed", "7", "--set", "optim.momentum=0.5"], "train.seed = 0 (now 7), optim.momentum = 0.95 (now 0.5)"),
        (["--data", "tiny.toml"], "data.paths"),
        (["--steps", "60"], "a length may change only before a decay begins (at step 4 as it was, the run is at 6)"),
    ],
)
def test_a_resume_as_another_run_is_refused_with_the_difference(command, copied, change: list[str], says: str):
    before = (copied / "config.toml").read_text()
    assert says in command("train", "--resume", "--run", "run", *change).sentence
    assert (copied / "config.toml").read_text() == before


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other words" * 99)])
def test_a_resume_on_other_bytes_is_refused_by_name(command, copied, change):
    (copied / "report.json").unlink()
    (copied / "data" / "train.bin").unlink()
    change(command.here / "words.txt")
    sentence = command("train", "--resume", "--run", "run").sentence
    assert "words.txt" in sentence
    assert "since the run began" in sentence


def test_a_run_that_another_process_trains_is_refused(command, copied):
    with (copied / ".lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "being trained by another process" in command("train", "--resume", "--run", "run").sentence


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_deleting_it_goes_back_one(command, copied, finished):
    newest = copied / "checkpoints" / "step-6"
    flip(newest / "optimizer.safetensors")
    sentence = command("train", "--resume", "--run", "run").sentence
    assert "step-6/optimizer.safetensors is damaged" in sentence
    assert "remove step-6" in sentence
    shown = command("dormouse", "info", "run")
    assert shown.code == 0
    assert "step 6: damaged" in shown.out
    assert "step 5: whole" in shown.out
    shutil.rmtree(newest)
    resumed = command("train", "--resume", "--run", "run")
    assert resumed.code == 0, resumed.err
    assert_same_end(copied, finished[0])


def test_a_partial_checkpoint_is_named(command, copied):
    (copied / "checkpoints" / "step-6" / "manifest.json").unlink()
    assert "step-6 is partial" in command("train", "--resume", "--run", "run").sentence
    assert "step-6 is partial" in command("dormouse", "generate", "run").sentence


@pytest.fixture
def small_disk(tmp_path: Path):
    """A folder with 1200 kB of room: two checkpoints and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_ends_with_one_sentence_and_the_last_checkpoint_intact(command, small_disk: Path):
    sentence = command.train(str(small_disk / "run")).sentence
    assert "No space left on device" in sentence
    assert "is intact" in sentence
    left = sorted(path.name for path in (small_disk / "run" / "checkpoints").iterdir())
    assert left
    assert not [name for name in left if name.endswith(".tmp")]
    written = command("dormouse", "generate", small_disk / "run", "--prompt", "a", "--bytes", "3")
    assert written.code == 0, written.err


def test_generate_writes_the_bytes_themselves_where_no_terminal_shows_them(command, copied):
    words = ("dormouse", "generate", copied, "--prompt", "the \x1b[31m\udcff\n", "--temperature", "1.5", "--bytes")
    prompt = command(*words, "0")
    assert (prompt.code, prompt.out, prompt.err) == (0, "the \x1b[31m\udcff\n", "")
    written = os.fsencode(command(*words, "40").out)
    assert written.startswith(b"the \x1b[31m\xff\n")
    assert len(written) == len(b"the \x1b[31m\xff\n") + 40


def test_generate_shows_a_terminal_nothing_that_it_would_obey(command, copied):
    ours, theirs = pty.openpty()
    words = [
        "dormouse",
        "generate",
        str(copied),
        "--prompt",
        "the \x1b[31m\udcff",
        "--temperature",
        "1.5",
        "--bytes",
        "40",
    ]
    script = str(Path(sys.executable).parent / words[0])
    process = subprocess.Popen([script, *words[1:]], env=command.environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 4096):
            shown += part
    assert process.wait(60) == 0
    assert shown.startswith(b"the \\x1b[31m\\xff")
    assert shown.endswith(b"\r\n")
    assert not [byte for byte in shown if byte < 32 and byte not in b"\r\n\t"]


def test_a_long_prompt_and_an_evaluation_are_announced_with_their_bytes(command, copied):
    words = ("dormouse", "generate", copied, "--bytes", "1", "--prompt")
    assert command(*words, "x" * 5000).err == "reading the prompt: 5,000 bytes\n"
    assert command("dormouse", "eval", copied, "--window", "300").err == "evaluating: 300 bytes\n"


def test_the_end_of_a_run_is_announced_on_stderr(finished):
    assert finished[1].err == "evaluating: 649 bytes\nfitting n-gram models and xz: 12,333 bytes\n"


def test_generate_takes_top_k_top_p_and_stops(command, copied):
    generate = ("dormouse", "generate", copied, "--prompt", "the ", "--bytes", "9")
    greedy = command(*generate, "--top-k", "1")
    assert greedy.code == 0, greedy.err
    # Whatever byte comes first ends the text.
    stops = [part for byte in range(1, 256) for part in ("--stop", os.fsdecode(bytes([byte])))]
    one = command(*generate, "--top-p", "1e-9", *stops)
    assert one.code == 0, one.err
    assert len("the ") < len(one.out) < len(greedy.out)
    assert greedy.out.startswith(one.out)
    assert "top_p must be above 0" in command(*generate, "--top-p", "0").sentence


def test_eval_agrees_with_the_end_of_the_run(command, copied):
    final = read(copied)[-1]
    scored = command("dormouse", "eval", copied)
    assert scored.code == 0, scored.err
    assert scored.out.startswith(f"{final['heldout_bpb']:.4f} BPB over 649 bytes")
