from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.sharedctypes
import os
import random
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dormouse_model import Dormouse
from dormouse_train.checkpoint import Checkpoint, RandomState
from dormouse_train.config import load_config
from dormouse_train.errors import UserError
from dormouse_train.optim.optimizer import Optimizer
from torch import Tensor

KILLS = 20


class Box:
    """A part that holds what it is given; loading copies into the tensors."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        for name, value in state_dict.items():
            if isinstance(value, Tensor):
                self.state[name].copy_(value)
            else:
                self.state[name] = value


def box(value: float = 0.0) -> Box:
    return Box(
        weight=torch.full((3, 5), value),
        high=torch.full((7,), value, dtype=torch.bfloat16),
        low=torch.full((7,), int(value), dtype=torch.int16),
        scalar=torch.tensor(value, dtype=torch.float64),
        step=int(value),
        rate=value / 3,
        names=["a", "b"],
    )


def checkpoint(run: Path, /, **parts: Box) -> Checkpoint:
    made = Checkpoint(run, keep=2)
    for name, part in parts.items():
        made.add(name, part)
    return made


def test_a_load_gives_back_every_value_and_leaves_every_tensor_where_it_is(tmp_path: Path):
    checkpoint(tmp_path, model=box(1.5), progress=Box(step=3)).save(3)
    model, progress = box(0.0), Box(step=0)
    before = {name: v.data_ptr() for name, v in model.state.items() if isinstance(v, Tensor)}
    assert checkpoint(tmp_path, model=model, progress=progress).load() == 3
    wanted = box(1.5).state
    for name, value in model.state.items():
        same = torch.equal(value, wanted[name]) if isinstance(value, Tensor) else value == wanted[name]
        assert same, name
    assert progress.state == {"step": 3}
    assert {name: v.data_ptr() for name, v in model.state.items() if isinstance(v, Tensor)} == before


def test_a_load_keeps_the_address_of_every_parameter_and_moment(tmp_path: Path):
    config = load_config("nano", ["model.d_model=32", "experts.num_experts=4", "experts.shared_rank=16"])
    ends = []
    for seed in (0, 1):
        model = Dormouse(config.architecture, seed=seed)
        optimizer = Optimizer(model, config.optim, config.train.lr)
        saved = Checkpoint(tmp_path).add("model", model).add("optimizer", optimizer)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **optimizer.state_dict()}
        before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        if seed == 0:
            for name, parameter in model.named_parameters():
                ones = torch.ones_like(parameter)
                parameter.grad = ones.to_sparse(1) if name.endswith("engram.tables") else ones
            optimizer.step(1.0)
            saved.save(1)
        else:
            saved.load()
        assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == before
        ends.append(tensors)
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


def test_tensors_that_are_views_or_transposed_are_stored_by_value(tmp_path: Path):
    whole = torch.arange(12.0).reshape(3, 4)
    checkpoint(tmp_path, model=Box(turned=whole.T, part=whole[:, 1:3])).save(1)
    found = Box(turned=torch.zeros(4, 3), part=torch.zeros(3, 2))
    checkpoint(tmp_path, model=found).load()
    assert torch.equal(found.state["turned"], whole.T)
    assert torch.equal(found.state["part"], whole[:, 1:3])


def test_the_folder_is_as_the_schema_says(tmp_path: Path):
    folder = checkpoint(tmp_path, model=box(1.0), progress=Box(step=1)).save(4)
    assert folder == tmp_path / "checkpoints" / "step-4"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors", "state.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["schema"], manifest["step"]) == (1, 4)
    assert manifest["files"].keys() == {"model.safetensors", "state.json"}
    state = json.loads((folder / "state.json").read_text())
    assert state == {"model": {"step": 1, "rate": 1 / 3, "names": ["a", "b"]}, "progress": {"step": 1}}


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ({"model": Box(weight=torch.zeros(2)), "zz": Box(step=0)}, "'weight' of part 'model'.*float32.3..*float32.2."),
        ({"model": Box(weight=torch.zeros(3, dtype=torch.float64)), "zz": Box(step=0)}, "float32.*float64"),
        ({"model": Box(other=torch.zeros(3)), "zz": Box(step=0)}, "'other' of part 'model'.*absent"),
        ({"model": Box(weight=torch.zeros(3)), "zz": Box(step=0, new=0)}, "'new' of part 'zz'.*absent"),
        ({"model": Box(weight=torch.zeros(3))}, "holds the part 'zz'"),
        ({"model": Box(weight=torch.zeros(3)), "zz": Box(step=0), "ema": Box()}, "lacks the part 'ema'"),
    ],
    ids=["shape", "dtype", "name", "plain name", "part missing", "part added"],
)
def test_what_does_not_fit_is_refused_before_anything_is_copied(tmp_path: Path, mine: dict[str, Box], says: str):
    checkpoint(tmp_path, model=Box(weight=torch.ones(3)), zz=Box(step=5)).save(5)
    with pytest.raises(UserError, match=says):
        checkpoint(tmp_path, **mine).load()
    for part in mine.values():
        assert all(not v.any() if isinstance(v, Tensor) else v == 0 for v in part.state.values())


def flip(path: Path, at: float, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_one_flipped_bit_is_found_and_the_way_back_is_named(tmp_path: Path, name: str, at: float):
    model = box(1.0)
    saved = checkpoint(tmp_path, model=model)
    saved.save(2)
    flip(saved.save(4) / name, at)
    model.state["weight"].fill_(9.0)
    with pytest.raises(UserError, match=rf"step-4/{name} is damaged.*remove step-4.*step 2"):
        saved.load()
    assert model.state["weight"].eq(9.0).all()
    assert saved.load(2) == 2
    assert model.state["weight"].eq(1.0).all()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "step-4 is partial"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model.safetensors is missing"),
        (lambda folder: os.truncate(folder / "model.safetensors", 40), r"model.safetensors is truncated"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest.json is damaged"),
    ],
    ids=["no manifest", "no tensors", "cut off", "manifest cut off"],
)
def test_a_partial_or_truncated_checkpoint_is_named_and_not_passed_over(tmp_path: Path, damage, says: str):
    saved = checkpoint(tmp_path, model=box(1.0))
    saved.save(2)
    damage(saved.save(4))
    with pytest.raises(UserError, match=rf"{says}.*remove step-4"):
        saved.load()


def test_no_checkpoint_or_not_that_step_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match="no checkpoint"):
        checkpoint(tmp_path, model=box()).load()
    checkpoint(tmp_path, model=box()).save(1)
    with pytest.raises(UserError, match="no step-2"):
        checkpoint(tmp_path, model=box()).load(2)


def test_only_the_newest_are_kept(tmp_path: Path):
    saved = checkpoint(tmp_path, model=box())
    for step in (1, 2, 3, 10):
        saved.save(step)
    assert saved.steps() == [3, 10]


def test_a_save_of_an_earlier_step_keeps_itself(tmp_path: Path):
    saved = Checkpoint(tmp_path, keep=1).add("model", box())
    saved.save(10)
    saved.save(3)
    assert saved.steps() == [3, 10]


def test_leftovers_are_ignored_and_cleaned(tmp_path: Path):
    saved = checkpoint(tmp_path, model=box(1.0))
    saved.save(1)
    for name in ("step-2.tmp", "step-3.tmp"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints" / "notes.tmp").write_text("a file")
    assert saved.load() == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_a_step_may_be_saved_again(tmp_path: Path):
    model = box(1.0)
    saved = checkpoint(tmp_path, model=model)
    saved.save(1)
    model.state["weight"].fill_(2.0)
    saved.save(1)
    model.state["weight"].zero_()
    saved.load(1)
    assert model.state["weight"].eq(2.0).all()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_a_step_that_was_about_to_be_replaced_is_put_back(tmp_path: Path):
    saved = checkpoint(tmp_path, model=box(1.0))
    folder = saved.save(1)
    folder.rename(folder.with_name("step-1.old.tmp"))
    assert saved.load() == 1


def test_a_part_is_added_once_under_a_plain_name(tmp_path: Path):
    made = checkpoint(tmp_path, model=box())
    for name in ("model", "a/b", "", "A"):
        with pytest.raises(ValueError, match="give another"):
            made.add(name, box())


def save_for_ever(run: Path, published: Any, again: bool) -> None:
    """Save ever greater values and report each one that was published."""
    model = Box(weight=torch.zeros(20_000), value=0)
    saved = Checkpoint(run, keep=2).add("model", model)
    value = max(saved.steps(), default=0)
    while True:
        value += 1
        model.state["weight"].fill_(value)
        model.state["value"] = value
        saved.save(1 if again else value)
        published.value = value


def interrupted(body: Any, *arguments: Any) -> None:
    """What Python does with a Ctrl-C where nobody listens, without the traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        body(*arguments)


@pytest.mark.parametrize("again", [False, True], ids=["new steps", "the same step"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_killed_save_never_loses_the_newest_published_checkpoint(tmp_path: Path, number: signal.Signals, again: bool):
    forked = multiprocessing.get_context("fork")
    rng = random.Random(int(number) + again)
    for kill in range(KILLS):
        run = tmp_path / str(kill)
        published = multiprocessing.sharedctypes.RawValue("q", 0)
        child = forked.Process(target=interrupted, args=(save_for_ever, run, published, again))
        child.start()
        while published.value == 0:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        assert child.pid is not None
        os.kill(child.pid, number)
        child.join()
        newest = published.value
        model = Box(weight=torch.zeros(20_000), value=0)
        Checkpoint(run).add("model", model).load()
        found = model.state["value"]
        assert newest <= found <= newest + 1
        assert model.state["weight"].eq(found).all()
        assert not list((run / "checkpoints").glob("*.tmp"))


def save_under_a_limit(run: Path, answer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        checkpoint(run, model=Box(weight=torch.ones(50_000))).save(2)
        answer.send("saved")
    except UserError as error:
        answer.send(str(error))


def test_a_full_disk_keeps_the_last_checkpoint_and_ends_with_one_sentence(tmp_path: Path):
    weight = torch.zeros(50_000)
    saved = checkpoint(tmp_path, model=Box(weight=weight))
    saved.save(1)
    forked = multiprocessing.get_context("fork")
    receive, send = forked.Pipe(duplex=False)
    child = forked.Process(target=save_under_a_limit, args=(tmp_path, send))
    child.start()
    sentence = receive.recv()
    child.join()
    assert "step-2 could not be written" in sentence
    assert "too large" in sentence
    assert "step-1 is intact" in sentence
    assert "--resume" in sentence
    assert "\n" not in sentence
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    weight.fill_(5.0)
    assert saved.load() == 1
    assert not weight.any()


def test_every_global_generator_goes_on_where_it_was(tmp_path: Path):
    def draws() -> list[float]:
        return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.standard_normal())]

    state = RandomState(torch.device("cpu"))
    draws()  # leaves half of a Gaussian pair behind
    Checkpoint(tmp_path).add("rng", state).save(1)
    wanted = draws() + draws()
    Checkpoint(tmp_path).add("rng", state).load()
    assert draws() + draws() == wanted
