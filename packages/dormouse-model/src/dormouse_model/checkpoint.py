"""Reading a run folder: which checkpoints it has, whether they are whole, and the model in one.

    run/config.toml                        the configuration as resolved
    run/checkpoints/step-N/manifest.json   {"schema": 1, "step": N, "files": {name: {"bytes": n, "sha256": hex}}}
    run/checkpoints/step-N/<part>.safetensors, state.json

The manifest is written last; a folder without one is partial. Folders that end in `.tmp` are unfinished and ignored.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dormouse_model.config import ConfigError, ModelConfig, read_config, validate
from dormouse_model.layout import checkpoint_folder, latest_step, steps
from dormouse_model.model import Dormouse

SCHEMA = 1
MANIFEST = "manifest.json"
VALUES = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; its message is one sentence that names the file, what is wrong and the mend."""


def verify(folder: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file has the size and SHA-256 that it says.

    Errors: `CheckpointError` for a folder that is missing or has no manifest (partial), an unreadable manifest, a file
    that is missing, too short, too long, or whose bytes changed, and for a folder named as another step.
    """
    folder = Path(folder)
    if not folder.is_dir():
        held = ", ".join(map(str, steps(folder.parent.parent))) or "none"
        raise CheckpointError(f"checkpoint: {folder} does not exist; choose one of the run's steps ({held})")
    manifest = _manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint: {path} is missing; {_others(folder)}")
        size = path.stat().st_size
        if size != expected["bytes"]:
            kind = "truncated" if size < expected["bytes"] else "too long"
            held = f"it has {size} bytes where its manifest says {expected['bytes']}"
            raise CheckpointError(f"checkpoint: {path} is {kind}: {held}; {_others(folder)}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected["sha256"]:
            raise CheckpointError(f"checkpoint: {path} is damaged: its bytes have changed; {_others(folder)}")
    if folder.name.startswith("step-") and folder.name != f"step-{manifest['step']}":
        raise CheckpointError(f"checkpoint: {folder} is that of step {manifest['step']}; give it back its name")
    return manifest


def read_part(folder: str | Path, part: str) -> dict[str, Tensor]:
    """The tensors of `part`, on the CPU. Does not check digests: call `verify` first.

    Errors: `CheckpointError` where the part is absent or unreadable.
    """
    path = Path(folder) / f"{part}.safetensors"
    if not path.is_file():
        held = ", ".join(sorted(p.stem for p in Path(folder).glob("*.safetensors"))) or "none"
        raise CheckpointError(f"checkpoint: {path} is missing (parts with tensors: {held}); {_others(Path(folder))}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read ({error}); {_others(Path(folder))}") from None


def read_values(folder: str | Path, part: str) -> dict[str, Any]:
    """The plain values of `part`: its entry in `state.json`, empty where it has none."""
    path = Path(folder) / VALUES
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"checkpoint: {path} is not JSON ({error}); {_others(Path(folder))}") from None
    return values.get(part, {})


def load(run: str | Path, *, step: int | None = None, device: torch.device | str = "cpu") -> Dormouse:
    """The model of a run folder's newest checkpoint, or of `step`, on `device`.

    Reads the model's tables of `run/config.toml`. Errors: `CheckpointError` where the run has no such
    checkpoint, it is not whole, or its tensors are not this configuration's; `ConfigError` for the configuration.
    """
    run = Path(run)
    config = run_config(run)
    while True:
        chosen = latest_step(run) if step is None else step
        if chosen is None:
            raise CheckpointError(f"checkpoint: {run} has no checkpoint yet; train it past its first checkpoint.every")
        folder = checkpoint_folder(run, chosen)
        try:
            verify(folder)
            tensors = read_part(folder, "model")
            break
        except (CheckpointError, FileNotFoundError):
            # A run in progress publishes a newer checkpoint and removes this one, perhaps while it is being read.
            if step is not None or folder.exists():
                raise
    model = Dormouse(config, device="meta").to_empty(device=device)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise CheckpointError(
            f"checkpoint: {folder / 'model.safetensors'} is not of {run / 'config.toml'} ({first}); restore that file"
        ) from None
    return model


def run_config(run: str | Path) -> ModelConfig:
    """The model's tables of `run/config.toml`. Errors: `CheckpointError` where `run` is no run folder."""
    path = Path(run) / "config.toml"
    if not path.is_file():
        raise CheckpointError(f"checkpoint: {run} has no {path.name}, so it is not a run folder; give one that is")
    tables = read_config(str(path))
    return validate(ModelConfig, {name: tables[name] for name in ModelConfig.model_fields if name in tables})


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"checkpoint: {folder} is partial: it has no {MANIFEST}; {_others(folder)}")
    manifest: dict[str, Any] = {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        schema = manifest["schema"]
        parts = {VALUES, *(file.name for file in folder.glob("*.safetensors"))}
        named = isinstance(manifest["step"], int) and parts <= manifest["files"].keys()
        whole = named and all(
            isinstance(f["bytes"], int) and isinstance(f["sha256"], str) for f in manifest["files"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        schema, whole = SCHEMA, False
    if schema != SCHEMA:
        raise CheckpointError(f"checkpoint: {path} has schema {schema!r}, not {SCHEMA}; upgrade dormouse-model")
    if not whole:
        raise CheckpointError(f"checkpoint: {path} is damaged: it is no manifest; {_others(folder)}")
    return manifest


def _others(folder: Path) -> str:
    """What to do instead, as the end of a sentence."""
    run = folder.parent.parent
    rest = [str(step) for step in steps(run) if checkpoint_folder(run, step) != folder]
    if not rest:
        return f"remove {folder.name}: there is no other checkpoint in {run}"
    return f"remove {folder.name} to go on from another checkpoint (step {', '.join(rest)})"


__all__ = [
    "CheckpointError",
    "ConfigError",
    "checkpoint_folder",
    "latest_step",
    "load",
    "read_part",
    "read_values",
    "run_config",
    "steps",
    "verify",
]
