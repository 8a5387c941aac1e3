"""Checkpoints of a run, written beside, synced, checksummed and renamed: what is published is whole.

```
run/checkpoints/step-N/   <part>.safetensors   tensors of a part
                          state.json           {part: plain values}; every part has an entry
                          manifest.json        written last: {"schema", "step", "files": {name: {"bytes", "sha256"}}}
```
A folder that is being written or removed is called `*.tmp` and is never read. `dormouse_model.checkpoint` is the
reading side that needs no trainer.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from dormouse_model.checkpoint import (
    MANIFEST,
    SCHEMA,
    VALUES,
    CheckpointError,
    checkpoint_folder,
    read_part,
    steps,
    verify,
)
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dormouse_train.errors import UserError

REPLACED = ".old.tmp"
"""End of the name of a step that is about to be replaced by another save of itself."""


class Stateful(Protocol):
    """Anything that can be a part: tensors and plain values (int, float, str, bool, list) by name."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, with tensors of the shapes that `load_state_dict` expects."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> Any:
        """Take over a state by copying into the tensors that are there, whose addresses others may hold."""
        ...


class Checkpoint:
    """`Checkpoint(run, keep=2).add("model", model).add("optimizer", optimizer).save(step)`, and `.load()`.

    `keep` newest steps stay on disk after a save; None keeps all. Any object with `state_dict` and `load_state_dict`
    can be a part, under a name of its own.
    """

    def __init__(self, run: Path, *, keep: int | None = None) -> None:
        self.run = Path(run)
        self._keep = keep
        self._parts: dict[str, Stateful] = {}

    def add(self, part: str, stateful: Stateful) -> Checkpoint:
        """Make `stateful` a part; returns the checkpoint itself."""
        if part in self._parts or not re.fullmatch(r"[a-z][a-z0-9_]*", part):
            raise ValueError(f"add: the part {part!r} is taken or no lower-case name; give another")
        self._parts[part] = stateful
        return self

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first, whole or damaged."""
        return steps(self.run)

    def save(self, step: int) -> Path:
        """Publish all parts as `step-N` and return its folder; then drop the oldest ones beyond `keep`.

        Until the rename nothing that was published is touched. Errors: `UserError` when the disk is full or may not be
        written; what was begun is then removed.
        """
        self._clean()
        target = checkpoint_folder(self.run, step)
        beside = target.with_name(f"{target.name}.tmp")
        try:
            beside.mkdir(parents=True)
            self._write(beside, step)
            _publish(beside, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise UserError(self._failure(target, error)) from None
        earlier = [old for old in self.steps() if old < step]
        for old in earlier[: max(0, len(earlier) + 1 - self._keep)] if self._keep else []:
            _remove(checkpoint_folder(self.run, old))
        return target

    def load(self, step: int | None = None) -> int:
        """Copy the parts of `step` (None: the newest) into those that were added; returns the step.

        Everything is read and compared, names, shapes and dtypes, before the first value is copied. Errors: `UserError`
        naming a checkpoint that is absent, partial or damaged, or that holds other parts or shapes; a damaged newest
        one is never passed over in silence: the error says which folder to delete to go on from the one before.
        """
        self._clean()
        written = self.steps()
        if not written or (step is not None and step not in written):
            wanted = "no checkpoint" if step is None else f"no step-{step}"
            raise UserError(f"checkpoint: {self.run} has {wanted}; give the folder of a run that has been saved")
        step = written[-1] if step is None else step
        folder = checkpoint_folder(self.run, step)
        try:
            verify(folder)
            found = _read(folder)
        except CheckpointError as error:
            raise UserError(str(error)) from None
        self._compare(folder, found)
        for part, state in found.items():
            self._parts[part].load_state_dict(state)
        return step

    def _write(self, folder: Path, step: int) -> None:
        plain: dict[str, dict[str, Any]] = {}
        for part, stateful in self._parts.items():
            state = dict(stateful.state_dict())
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            plain[part] = {name: value for name, value in state.items() if name not in tensors}
            if tensors:
                stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
                save_file(stored, folder / f"{part}.safetensors")
        _write_json(folder / VALUES, plain)
        files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
        _write_json(folder / MANIFEST, {"schema": SCHEMA, "step": step, "files": files})
        for path in [*folder.iterdir(), folder]:
            _sync(path)

    def _compare(self, folder: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
        for part in sorted(found.keys() ^ self._parts.keys()):
            verb = "holds" if part in found else "lacks"
            raise UserError(
                f"checkpoint: {folder} {verb} the part '{part}', unlike this run; resume with what wrote it"
            )
        for part, state in found.items():
            stored, wanted = _kinds(state), _kinds(self._parts[part].state_dict())
            for name in sorted(stored.keys() | wanted.keys()):
                if stored.get(name) != wanted.get(name):
                    raise UserError(
                        f"checkpoint: '{name}' of part '{part}' in {folder} is {stored.get(name, 'absent')}, this run "
                        f"has {wanted.get(name, 'nothing of that name')}; resume with the configuration that wrote it"
                    )

    def _failure(self, target: Path, error: Exception) -> str:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        written = self.steps()
        last = f"step-{written[-1]} is intact" if written else "none was written before"
        return (
            f"checkpoint: {target} could not be written ({reason}), {last}; "
            "free space or lift the limit, then go on with --resume"
        )

    def _clean(self) -> None:
        """Remove what a killed process left, after putting back a step that it was about to replace."""
        for left in checkpoint_folder(self.run, 0).parent.glob("*.tmp"):
            replaced = left.with_name(left.name.removesuffix(REPLACED))
            if left.name.endswith(REPLACED) and not replaced.exists():
                left.rename(replaced)
            elif left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


class RandomState:
    """The part `rng`: the global generators of torch (and its CUDA `device`), numpy and Python."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """The states as tensors and lists."""
        name, keys, *rest = np.random.get_state()
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        state["numpy"] = [name, np.asarray(keys).tolist(), *rest]
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Set the generators."""
        torch.set_rng_state(state_dict["torch"])
        version, internal, gauss = state_dict["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = state_dict["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state_dict["cuda"], self._device)


def seed_generators(seed: int) -> None:
    """Start every global generator at `seed`: two runs of one configuration hold the same `rng` at every step."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / VALUES).read_text(encoding="utf-8"))
    for part, state in found.items():
        if (folder / f"{part}.safetensors").exists():
            state.update(read_part(folder, part))
    return found


def _kinds(state: Mapping[str, Any]) -> dict[str, str]:
    """What has to be equal of each value: a tensor's dtype and shape, and that a plain value is one."""
    return {n: f"{v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else "a plain value" for n, v in state.items()}


def _publish(beside: Path, target: Path) -> None:
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():  # a folder cannot be renamed over one with files; `_clean` puts it back if we die in between
        target.rename(replaced)
    beside.replace(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Hidden by a rename first, so that a killed removal leaves no partial checkpoint."""
    hidden = folder.with_name(f"{folder.name}.tmp")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = [
    "Checkpoint",
    "Stateful",
]
