"""A run begun with the weights of another, or of an exported file, and the tables of a dict as its configuration."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Generator
from pathlib import Path

import dormouse_train
import pytest
import torch
from dormouse_train.commands import export
from dormouse_train.config import load_config
from dormouse_train.errors import UserError
from dormouse_train.metrics import read
from safetensors.torch import load_file

TINY = Path(__file__).with_name("tiny.toml")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """One thread, and two texts in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_bytes(b"the dormouse slept and " * 60)
    Path("numbers.txt").write_bytes(b"0 1 2 3 4 5 6 7 8 9 10 " * 60)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def train(run: str, data: str, **keys: object) -> dormouse_train.Result:
    overrides = {"data.paths": [data], "train.steps": 2, "eval.sample_bytes": 0}
    return dormouse_train.train(
        TINY, run=run, overrides=overrides | {k.replace("_", ".", 1): v for k, v in keys.items()}
    )


def model(run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "checkpoints" / f"step-{step}" / "model.safetensors")


def lines(run: str) -> list[dict]:
    return [line for line in read(Path(run)) if "loss" in line]


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def test_the_tables_of_a_file_as_a_dict_train_like_the_file():
    tables = tomllib.loads(TINY.read_text())
    tables["data"] = {"paths": ["words.txt"]}
    tables["train"]["steps"] = 2
    result = dormouse_train.train(tables, run="dict", overrides={"eval.sample_bytes": 0})
    assert (result.run, result.step) == (Path("dict"), 2)
    train("file", "words.txt")
    assert_equal(model("dict", 2), model("file", 2))


def test_a_dict_may_stand_on_a_named_configuration():
    config = load_config({"base": "nano", "train": {"steps": 7}}, ["train.batch=3"])
    assert (config.train.steps, config.train.batch) == (7, 3)
    assert config.architecture == load_config("nano").architecture


def test_a_run_begins_with_all_the_weights_of_another_at_step_zero():
    train("old", "words.txt")
    train("new", "numbers.txt", train_init="old", train_lr=1e-30, train_steps=1)
    before, after = model("old", 2), model("new", 1)
    assert before.keys() == after.keys()
    for name, value in after.items():
        # Nothing moves at that rate but the projection back to orthonormal factors, by roundings.
        if f"{name.removesuffix('_low')}_low" not in after:
            assert torch.allclose(value, before[name], rtol=0, atol=1e-20), name
        elif not name.endswith("_low"):
            assert torch.allclose(value, before[name], rtol=0.01, atol=0), name
    assert [line["step"] for line in lines("new")] == [1]


def test_an_exported_file_begins_a_run_as_its_rounded_weights(capsys: pytest.CaptureFixture[str]):
    train("old", "words.txt", train_steps=8)
    assert export.command(Path("old"), Path("old.safetensors"), None) == 0
    assert "parameters of step 8" in capsys.readouterr().out
    for run, init in (("fresh", ""), ("full", "old"), ("plain", "old.safetensors")):
        train(run, "words.txt", train_init=init, train_steps=1)
    fresh, full, plain = (lines(run)[0]["loss"] for run in ("fresh", "full", "plain"))
    assert plain == pytest.approx(full, abs=0.02)
    assert full < fresh - 0.2


def test_a_resume_of_a_run_that_began_with_weights_does_not_need_them_any_more():
    train("old", "words.txt")
    for run in ("whole", "cut"):
        train(run, "numbers.txt", train_init="old", train_steps=3, checkpoint_every=1)
    shutil.rmtree(Path("cut") / "checkpoints" / "step-3")
    shutil.rmtree("old")
    dormouse_train.train(run="cut", resume=True)
    assert_equal(model("cut", 3), model("whole", 3))
    shutil.rmtree(Path("cut") / "checkpoints")
    with pytest.raises(UserError, match=r"--init: .*old"):
        dormouse_train.train(run="cut", resume=True)


@pytest.mark.parametrize(
    ("init", "keys", "says"),
    [
        (
            "old",
            {"experts_rank": 3},
            r"--init: 'block.experts.gate_up_proj' is \[5, 8, 24\] in .* model is \[5, 6, 24\]",
        ),
        ("nothing", {}, "--init: .*nothing"),
        ("words.txt", {}, "--init: .*words.txt is no safetensors file"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_leave_no_folder(init: str, keys: dict, says: str):
    train("old", "words.txt", train_steps=1)
    with pytest.raises(UserError, match=says):
        train("new", "numbers.txt", train_init=init, **keys)
    assert not Path("new").exists()


def test_an_export_of_what_is_no_run_or_to_no_file_is_refused():
    with pytest.raises(UserError, match="nothing does not exist"):
        export.command(Path("nothing"), Path("a.safetensors"), None)
    with pytest.raises(UserError, match="give a file"):
        export.command(Path("nothing"), Path("none/a.safetensors"), None)
    train("old", "words.txt", train_steps=1)
    with pytest.raises(UserError, match="step-7 does not exist"):
        export.command(Path("old"), Path("a.safetensors"), 7)
