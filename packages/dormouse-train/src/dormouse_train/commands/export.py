"""`dormouse export`: the weights of a run as one plain file."""

from __future__ import annotations

from pathlib import Path

from dormouse_train import run_folder
from dormouse_train.errors import UserError


def command(run: Path, out: Path, step: int | None) -> int:
    """Write the file, in place of one of that name, and print a line: how large it is and what it holds."""
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out: {out} is a folder, or is in none that exists; give a file such as model.safetensors")
    run_folder.tables(run, argument="RUN")
    from dormouse_model import export
    from dormouse_model.checkpoint import CheckpointError, latest_step, load

    try:
        model = load(run, step=step)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    nbytes = export(model, out)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out}: {numbers:,} parameters of step {latest_step(run) if step is None else step}, {nbytes:,} bytes")
    return 0
