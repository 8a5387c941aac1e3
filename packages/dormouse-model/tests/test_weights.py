"""One plain file of bf16 weights: what it holds, what comes back, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dormouse_model import Dormouse, export, load
from dormouse_model.checkpoint import CheckpointError
from dormouse_model.weights import install, mismatch, shapes
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@pytest.fixture
def file(tmp_path: Path, tiny: Dormouse) -> Path:
    export(tiny, tmp_path / "tiny.safetensors")
    return tmp_path / "tiny.safetensors"


def rounded(model: Dormouse) -> Dormouse:
    """A copy whose every floating-point tensor is of bf16 values, and whose factors have no low halves."""
    copy = Dormouse(model.config)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.copy_(parameter.bfloat16())
        for factor in copy.factors():
            factor.low.zero_()
    return copy


def test_a_file_gives_the_logits_of_the_model_with_its_weights_rounded(file: Path, tiny: Dormouse):
    ids = torch.arange(40, dtype=torch.uint8).reshape(2, 20)
    loaded = load(file)
    assert loaded.config == tiny.config
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, rounded(tiny)(ids).logits)
        assert not torch.equal(loaded(ids).logits, tiny(ids).logits)


def test_what_was_loaded_from_a_file_is_exported_as_the_same_bytes(file: Path, tmp_path: Path):
    nbytes = export(load(file), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    assert nbytes == file.stat().st_size


def test_the_file_is_plain_bf16_without_low_halves(file: Path, tiny: Dormouse):
    stored = load_file(file)
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert stored.keys() == {name for name in tiny.state_dict() if not name.endswith("_low")}
    with safe_open(file, "pt") as opened:
        assert opened.metadata().keys() == {"dormouse"}


def test_a_loaded_factor_has_a_master_of_exactly_its_bf16_values(file: Path):
    for factor in load(file).factors():
        assert torch.equal(factor.master(), factor.high.detach().float()), factor.name


def test_full_weights_are_installed_with_their_low_halves(tmp_path: Path, tiny: Dormouse):
    save_file(tiny.state_dict(), tmp_path / "model.safetensors")
    other = Dormouse(tiny.config, seed=9)
    install(other, tmp_path / "model.safetensors")
    for name, value in other.state_dict().items():
        assert torch.equal(value, tiny.state_dict()[name]), name


@pytest.mark.parametrize("section", ["model.num_heads", "experts.num_experts"])
def test_another_shape_is_refused_by_name_before_anything_is_copied(file: Path, tiny: Dormouse, section: str):
    outer, inner = section.split(".")
    tables = tiny.config.model_dump()
    tables[outer][inner] += 1
    other = Dormouse(type(tiny.config).model_validate(tables))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    named = "'block.kda.A_log' is [" if outer == "model" else "'block.experts.gate_up_proj' is ["
    with pytest.raises(CheckpointError) as refused:
        install(other, file)
    assert named in str(refused.value)
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_tensor_that_one_side_lacks_is_named(file: Path, tmp_path: Path, tiny: Dormouse):
    stored = load_file(file)
    alpha = stored.pop("alpha")
    save_file(stored | {"beta": alpha}, tmp_path / "other.safetensors")
    assert "'alpha' is absent in" in str(mismatch(tiny, tmp_path / "other.safetensors"))
    save_file(stored | {"alpha": alpha, "beta": alpha.clone()}, tmp_path / "more.safetensors")
    assert str(mismatch(tiny, tmp_path / "more.safetensors")).endswith("and this model is without it")


def test_shapes_on_the_meta_device_are_those_of_the_file(file: Path, tiny: Dormouse):
    assert mismatch(Dormouse(tiny.config, device="meta"), file) is None
    assert shapes(file)["block.experts.down.weight"] == [tiny.config.model.d_model, tiny.config.experts.d_ffn]


def test_what_is_no_export_is_refused(file: Path, tmp_path: Path):
    (tmp_path / "text").write_text("no weights")
    save_file(load_file(file), tmp_path / "bare.safetensors")
    for wrong in ("text", "bare.safetensors"):
        with pytest.raises(CheckpointError, match=f"{wrong} is no exported model"):
            load(tmp_path / wrong)
    with pytest.raises(CheckpointError, match="is one file and has no step 3"):
        load(file, step=3)


def test_a_failed_export_leaves_the_old_file(file: Path, tiny: Dormouse, monkeypatch: pytest.MonkeyPatch):
    before = file.read_bytes()

    def full(stored: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dormouse_model.weights.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export(tiny, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == before
