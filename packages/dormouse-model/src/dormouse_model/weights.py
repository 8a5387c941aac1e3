"""A model as one plain file: its weights in bf16, as safetensors, with its configuration in the file's metadata.

A checkpoint holds a factor's fp32 master as two halves; the file holds the high half, which is what compute reads, and
the low halves come back as zeros. Every other floating-point tensor is rounded to bf16.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dormouse_model import checkpoint
from dormouse_model.checkpoint import CheckpointError
from dormouse_model.config import ModelConfig, validate
from dormouse_model.model import Dormouse, another_kind

METADATA = "dormouse"
"""The key of the file's metadata whose value is the configuration's sections as JSON."""


def load(source: str | Path, *, step: int | None = None, device: torch.device | str = "cpu") -> Dormouse:
    """The model of a run's newest checkpoint, or of `step`, or of a file that `export` wrote, on `device`.

    Errors: `CheckpointError` where there is no such checkpoint or file, it is not whole, or its tensors are not those
    of its configuration; `ConfigError` for the configuration.
    """
    if not Path(source).is_file():
        return checkpoint.load(source, step=step, device=device)
    file = weights_file(source, step)
    model = Dormouse(exported_config(file), device="meta").to_empty(device=device)
    install(model, file)
    return model


def export(model: Dormouse, file: str | Path) -> int:
    """Write `model` to `file`, whole or not at all, and return its size in bytes. Errors: `OSError`."""
    file = Path(file)
    low = low_halves(model)
    stored = {name: _plain(value) for name, value in model.state_dict().items() if name not in low}
    # One entry: safetensors writes several in no fixed order, and equal weights are to be equal bytes.
    metadata = {METADATA: model.config.model_dump_json(exclude_none=True)}
    beside = file.with_name(f"{file.name}.tmp")
    try:
        save_file(stored, beside, metadata)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(file)
    except SafetensorError as error:  # how it says that a file could not be written
        raise OSError(f"{file} could not be written ({error})") from None
    finally:
        beside.unlink(missing_ok=True)
    return file.stat().st_size


def _plain(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return (value.bfloat16() if value.is_floating_point() else value).contiguous()


def low_halves(model: Dormouse) -> set[str]:
    """The names of the tensors that hold the low halves of factors, which a plain file is without."""
    return {f"{factor.name}_low" for factor in model.factors()}


def weights_file(source: str | Path, step: int | None = None) -> Path:
    """Where the weights of `source` lie: an exported file itself, or the model of a run's newest (or given) checkpoint.

    Errors: `CheckpointError` for a source that is neither, or a checkpoint that is not whole.
    """
    source = Path(source)
    if source.is_file():
        if step is not None:
            raise CheckpointError(f"weights: {source} is one file and has no step {step}; leave the step out")
        return source
    checkpoint.run_config(source)
    chosen = checkpoint.latest_step(source) if step is None else step
    if chosen is None:
        raise CheckpointError(f"checkpoint: {source} has no checkpoint yet; train it past its first checkpoint.every")
    folder = checkpoint.checkpoint_folder(source, chosen)
    checkpoint.verify(folder)
    return folder / "model.safetensors"


def exported_config(file: str | Path) -> ModelConfig:
    """The configuration in the metadata of an exported file. Errors: `CheckpointError` where there is none."""
    try:
        with safe_open(file, "pt") as opened:
            stored = (opened.metadata() or {})[METADATA]
        return validate(ModelConfig, json.loads(stored))
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"weights: {file} is no exported model ({error}); give what export wrote") from None


def shapes(file: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a file of weights, without reading them. Errors: `CheckpointError`."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights: {file} is no safetensors file ({error}); give what export wrote") from None


def mismatch(model: Dormouse, file: Path) -> str | None:
    """The first tensor, by name, that `file` and `model` do not share in one shape, as half a sentence; None for none.

    Another mixer or kind of experts is named before any tensor. Low halves are left out: a file may have them or not.
    """
    low, found = low_halves(model), shapes(file)
    if (reason := another_kind(model, found)) is not None:
        return reason
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    for name in sorted(found.keys() | wanted.keys()):
        if name not in low and found.get(name) != wanted.get(name):
            there, here = found.get(name, "absent"), wanted.get(name, "without it")
            return f"'{name}' is {there} in {file} and this model is {here}"
    return None


@torch.no_grad()
def install(model: Dormouse, file: Path) -> None:
    """Copy the weights of `file` into the tensors of `model`, the low halves of its factors zero where it has none.

    Errors: `CheckpointError` naming the first tensor that does not fit, before anything is copied.
    """
    if (wrong := mismatch(model, file)) is not None:
        raise CheckpointError(f"weights: {wrong}; give weights of this configuration")
    found, held = load_file(file), model.state_dict()
    absent = {name: torch.zeros_like(held[name], device="cpu") for name in low_halves(model) - found.keys()}
    model.load_state_dict(found | absent)
