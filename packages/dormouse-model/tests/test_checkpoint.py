"""The read side of a run folder: whole checkpoints load, damaged ones are named with their file and the mend."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from dormouse_model import Dormouse, checkpoint, load
from dormouse_model.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    latest_step,
    read_part,
    read_values,
    steps,
    verify,
)
from safetensors.torch import save_file

CONFIG = """
[model]
d_model = 24
num_heads = 3
head_dim = 8
[experts]
num_experts = 5
top_k = 2
rank = 4
shared_rank = 6
d_ffn = 37
[engram]
enabled = true
orders = [1, 2, 4]
rows = 300
dim = 8
[train]
steps = 400
"""


def publish(run: Path, step: int, model: Dormouse) -> Path:
    """A checkpoint folder as the schema has it."""
    folder = checkpoint_folder(run, step)
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps({"progress": {"step": step}}))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
    }
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "step": step, "files": files}))
    return folder


@pytest.fixture
def run(tmp_path: Path, tiny: Dormouse) -> Path:
    """A run with checkpoints of steps 3 and 10."""
    run = tmp_path / "run"
    for step in (3, 10):
        with torch.no_grad():
            tiny.alpha.fill_(step)
        publish(run, step, tiny)
    (run / "config.toml").write_text(CONFIG)
    return run


def complaint(run: Path, step: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(run, step=step)
    return str(caught.value)


def test_the_newest_checkpoint_is_the_model_that_was_saved(run, tiny, bytes_of):
    loaded = load(run)
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in tiny.state_dict().items())
    assert torch.equal(loaded(bytes_of(2, 20)).logits, tiny(bytes_of(2, 20)).logits)
    assert torch.equal(loaded.get_parameter("block.experts.down.weight")[:, 37:], torch.zeros(24, 11))


def test_a_step_can_be_asked_for(run):
    assert load(run, step=3).alpha.item() == 3
    assert load(str(run)).alpha.item() == 10


def test_steps_are_ordered_by_number_and_unfinished_folders_are_none(run):
    (run / "checkpoints" / "step-20.tmp").mkdir()
    (run / "checkpoints" / "step-x").mkdir()
    (run / "checkpoints" / "step-99").write_text("a file")
    assert steps(run) == [3, 10]
    assert latest_step(run) == 10
    assert latest_step(run / "nowhere") is None


def test_parts_and_plain_values_are_read_by_name(run):
    folder = checkpoint_folder(run, 10)
    assert read_part(folder, "model")["alpha"].item() == 10
    assert read_values(folder, "progress") == {"step": 10}
    assert read_values(folder, "rng") == {}
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing \(parts with tensors: model\)"):
        read_part(folder, "optimizer")


def test_a_flipped_bit_is_found(run):
    path = checkpoint_folder(run, 10) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    mend = "remove step-10 to go on from another checkpoint (step 3)"
    assert complaint(run) == f"checkpoint: {path} is damaged: its bytes have changed; {mend}"


def test_a_truncated_file_is_found_with_its_sizes(run):
    path = checkpoint_folder(run, 10) / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{path} is truncated: it has {size - 7} bytes where its manifest says {size}" in complaint(run)


def test_a_file_with_bytes_too_many_or_gone_is_found(run):
    folder = checkpoint_folder(run, 10)
    with (folder / "state.json").open("a") as file:
        file.write(" ")
    assert "state.json is too long" in complaint(run)
    (folder / "state.json").unlink()
    assert "state.json is missing" in complaint(run)


def test_a_folder_without_a_manifest_is_partial(run):
    (checkpoint_folder(run, 10) / "manifest.json").unlink()
    assert "step-10 is partial: it has no manifest.json; remove step-10" in complaint(run)
    assert load(run, step=3).alpha.item() == 3


@pytest.mark.parametrize("files", ["[]", '{"a": 3}', '{"a": {"bytes": 1}}'])
def test_a_manifest_without_usable_files_is_named(files, run):
    path = checkpoint_folder(run, 10) / "manifest.json"
    path.write_text('{"schema": 1, "files": ' + files + "}")
    assert f"{path} is damaged" in complaint(run)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}'])
def test_a_broken_manifest_is_named(text, run):
    path = checkpoint_folder(run, 10) / "manifest.json"
    path.write_text(text)
    assert f"{path} is damaged" in complaint(run)


def test_a_manifest_of_another_schema_asks_for_an_upgrade(run):
    path = checkpoint_folder(run, 10) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    assert "has schema 2, not 1; upgrade dormouse-model" in complaint(run)


def test_a_checkpoint_of_another_configuration_is_named(run):
    (run / "config.toml").write_text(CONFIG.replace("d_model = 24", "d_model = 48"))
    message = complaint(run)
    assert "model.safetensors is not of" in message
    assert "size mismatch" in message


def test_what_is_not_there_is_named(run, tmp_path):
    assert "step-7 does not exist; choose one of the run's steps (3, 10)" in complaint(run, step=7)
    assert "has no config.toml, so it is not a run folder" in complaint(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text(CONFIG)
    assert "has no checkpoint yet" in complaint(empty)


def test_the_only_checkpoint_has_no_other_to_go_on_from(run):
    for path in checkpoint_folder(run, 3).iterdir():
        path.unlink()
    checkpoint_folder(run, 3).rmdir()
    (checkpoint_folder(run, 10) / "manifest.json").unlink()
    assert complaint(run).endswith(f"remove step-10: there is no other checkpoint in {run}")


def test_a_whole_checkpoint_verifies_to_its_manifest(run):
    manifest = verify(checkpoint_folder(run, 3))
    assert manifest["step"] == 3
    assert set(manifest["files"]) == {"model.safetensors", "state.json"}


def test_a_checkpoint_under_the_name_of_another_step_is_refused(run):
    checkpoint_folder(run, 10).rename(checkpoint_folder(run, 12))
    assert "step-12 is that of step 10; give it back its name" in complaint(run)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_manifest_that_leaves_out_a_part_is_damaged(run, name):
    path = checkpoint_folder(run, 10) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][name]
    path.write_text(json.dumps(manifest))
    assert "manifest.json is damaged" in complaint(run)


@pytest.mark.parametrize("when", ["verify", "read_part"])
def test_a_checkpoint_that_a_run_in_progress_replaces_while_it_is_read_is_passed_over_for_the_newer(
    run, tiny, when, monkeypatch
):
    real = getattr(checkpoint, when)

    def replaced(folder, *rest):
        if folder.name == "step-10" and not checkpoint_folder(run, 20).exists():
            publish(run, 20, tiny)
            shutil.rmtree(folder)
        return real(folder, *rest)

    with torch.no_grad():
        tiny.alpha.fill_(20)
    monkeypatch.setattr(checkpoint, when, replaced)
    assert load(run).alpha == 20
    with pytest.raises(CheckpointError, match="step-10 does not exist"):
        load(run, step=10)


def test_a_name_with_a_leading_zero_is_no_step(run):
    checkpoint_folder(run, 10).rename(run / "checkpoints" / "step-010")
    assert steps(run) == [3]
