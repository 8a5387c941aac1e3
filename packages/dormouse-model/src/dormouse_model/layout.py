"""Where the checkpoints of a run folder lie. Importing this module imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(0|[1-9]\d*)")


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of `step` lies in `run`."""
    return Path(run) / CHECKPOINTS / f"step-{step}"


def steps(run: str | Path) -> list[int]:
    """The steps that `run` has a checkpoint folder of, ascending; whole or not."""
    folder = Path(run) / CHECKPOINTS
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in matches if match)


def latest_step(run: str | Path) -> int | None:
    """The newest of `steps`, or None. A damaged newest one is not skipped here: `checkpoint.verify` names it."""
    return max(steps(run), default=None)
