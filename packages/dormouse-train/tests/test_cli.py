from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from dormouse_model.config import named_configs
from dormouse_model.kda.selection import FallbackRefused
from dormouse_train.cli import _sentence

HELP = [["train"], ["dormouse"], *(["dormouse", name] for name in ("train", "generate", "eval", "export", "info"))]

WITHOUT_HEAVY_IMPORTS = """
import sys
from dormouse_train import cli
sys.argv[0] = sys.argv[1]
del sys.argv[1]
try:
    {"train": cli.train_main, "dormouse": cli.main}[sys.argv[0]]()
except SystemExit as left:
    assert left.code == 0, left.code
heavy = {"torch", "numpy", "rich.console", "dormouse_model", "dormouse_kernels"} & sys.modules.keys()
assert not heavy, heavy
"""


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_takes_less_than_a_second(command, words: list[str]):
    def spent() -> float:  # by processes that ended: other work on the machine is not what is measured
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    ended = command(*words, "--help")
    assert ended.code == 0
    assert "Usage:" in ended.out
    assert 0 < spent() - before < 1


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_imports_nothing_heavy(words: list[str]):
    subprocess.run([sys.executable, "-c", WITHOUT_HEAVY_IMPORTS, *words, "--help"], check=True, capture_output=True)


def test_train_is_the_same_as_dormouse_train(command):
    alone, below = command("train", "--help").out, command("dormouse", "train", "--help").out
    assert alone.replace("Usage: train", "Usage: dormouse train") == below
    for option in ("--config", "--data", "--steps", "--run", "--resume", "--seed", "--device", "--set"):
        assert option in alone


def test_the_list_of_commands_cuts_no_line_short(command):
    assert "..." not in command("dormouse", "--help").out.partition("Commands:")[2]


def test_help_names_every_configuration_and_the_page_of_the_keys(command):
    text = command("train", "--help").out
    listed = " ".join(text.split())
    assert all(f"{name}, " in listed for name in named_configs())
    assert "docs/train.md" in text


TRAIN = ["train", "--config", "tiny.toml", "--data", "words.txt", "--run", "new"]
MISTAKES = {
    "unknown option": (["train", "--stpes", "3"], "--stpes"),
    "no number": (["train", "--steps", "few"], "--steps"),
    "unknown command": (["dormouse", "trian"], "trian"),
    "no run": (["dormouse", "generate"], "run"),
    "missing data": ([*TRAIN, "--data", "nothing.txt"], "nothing.txt does not exist; give a file"),
    "empty data": ([*TRAIN, "--data", "empty.txt"], "empty.txt is empty"),
    "no path of data": ([*TRAIN, "--data", ""], "a path is empty; give a file"),
    "a home of nobody": ([*TRAIN, "--data", "~nobody-of-that-name/x"], "does not exist"),
    "no name of a configuration": (["train", "--config", "", "--run", "new"], "neither a named configuration"),
    "info of a file": (["dormouse", "info", "words.txt"], "RUN: words.txt is no folder"),
    "four bytes": (
        ["train", "--config", "tiny.toml", "--data", "short.txt", "--run", "new"],
        "train.seq = 32 needs 33",
    ),
    "unknown configuration": (["train", "--config", "nanno", "--run", "new"], "did you mean 'nano'"),
    "missing configuration": (
        ["train", "--config", "none.toml", "--run", "new"],
        "'none.toml' is neither a named configuration nor a file; "
        "give b1, medium, nano, small or the path of a TOML file",
    ),
    "unknown key": ([*TRAIN, "--set", "train.stesp=3"], "did you mean 'train.steps'"),
    "wrong value": ([*TRAIN, "--set", "train.batch=0"], "'train.batch', got 0"),
    "no steps": ([*TRAIN, "--steps", "0"], "'train.steps', got 0"),
    "negative seed": ([*TRAIN, "--seed", "-1"], "'train.seed', got -1"),
    "unknown device": ([*TRAIN, "--device", "tpu"], "'train.device', got 'tpu'"),
    "no CUDA device": ([*TRAIN, "--device", "cuda"], "no CUDA device here; start a run with --device cpu"),
    "no CUDA device, found before the data are read": (
        [*TRAIN, "--device", "cuda", "--data", "nothing.txt"],
        "no CUDA device here; start a run with --device cpu",
    ),
    "run exists": (["train", "--config", "tiny.toml", "--run", "begun"], "--run: begun exists; add --resume"),
    "run is a folder of notes": (
        ["train", "--config", "tiny.toml", "--run", "full"],
        "--run: full is no run and holds other files; give a new or an empty folder",
    ),
    "run is a file": (["train", "--config", "tiny.toml", "--run", "words.txt"], "words.txt is a file"),
    "resume of nothing": (["train", "--resume"], "no run under runs/"),
    "resume of no folder": (["train", "--resume", "--run", "new"], "new does not exist"),
    "resume of another folder": (
        ["train", "--resume", "--run", "full"],
        "--run: full is not a run, as it holds no config.toml; give the folder of a run",
    ),
    "info of no run": (
        ["dormouse", "info", "full"],
        "RUN: full is not a run, as it holds no config.toml; give the folder of a run",
    ),
    "generate from the folder of runs": (
        ["dormouse", "generate", "."],
        "RUN: . is not a run, as it holds no config.toml; give the folder of a run, such as begun",
    ),
    "eval of no run": (["dormouse", "eval", "new"], "RUN: new does not exist"),
    "eval of test and data": (
        ["dormouse", "eval", "new", "--test", "--data", "words.txt"],
        "--test: --data gives",
    ),
    "seed of 65 bits": (["dormouse", "generate", "full", "--seed", str(2**64)], "--seed"),
    "temperature below zero": (["dormouse", "generate", "full", "--temperature", "-1"], "--temperature"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_no_folder_behind(command, mistake: str):
    (command.here / "empty.txt").touch()
    (command.here / "short.txt").write_bytes(b"four")
    (command.here / "full").mkdir()
    (command.here / "full" / "notes.txt").write_text("mine")
    (command.here / "begun").mkdir()
    for name in (".lock", "config.toml", "data.json"):
        (command.here / "begun" / name).touch()
    before = sorted(command.here.rglob("*"))
    words, says = MISTAKES[mistake]
    assert says in command(*words).sentence
    assert sorted(command.here.rglob("*")) == before


def test_a_folder_that_may_not_be_written_is_one_sentence(command):
    blocked = Path("words.txt") / "run"
    assert "words.txt" in command(*TRAIN[:-1], str(blocked)).sentence


def test_a_reader_that_leaves_is_no_error(command):
    process = command.start("dormouse", "train", "--help")
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert "Traceback" not in err


def test_python_offers_the_same_names_without_importing_torch():
    program = "import sys, dormouse_train; assert 'train' in dir(dormouse_train); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nMore advice."), "CUDA out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."),
            "9 bytes; give",
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried 9 bytes."), "9 bytes; give"),
        (MemoryError(), "out of memory; give"),
        (FallbackRefused("kda: refused; mend that"), "kda: refused; mend that"),
        (RuntimeError("shape mismatch"), None),
    ],
)
def test_a_lack_of_memory_and_a_refused_fallback_are_sentences_and_other_faults_are_not(error: Exception, says):
    sentence = _sentence(error)
    assert sentence is None if says is None else says in str(sentence)
