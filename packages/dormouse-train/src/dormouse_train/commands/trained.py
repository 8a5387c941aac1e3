"""The model of a run, as the commands that read one need it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dormouse_train import run_folder
from dormouse_train.config import Config, assemble
from dormouse_train.errors import UserError

if TYPE_CHECKING:
    from dormouse_model import Dormouse


def load(run: Path) -> tuple[Config, Dormouse]:
    """The configuration and the model of the newest checkpoint, on the device it was trained on where that is here.

    Errors: `UserError` for a folder that is no run, or whose newest checkpoint is absent, partial or damaged.
    """
    config = assemble(run_folder.tables(run, argument="RUN"))
    import torch
    from dormouse_model import checkpoint

    device = config.train.device if torch.cuda.is_available() else "cpu"
    try:
        return config, checkpoint.load(run, device=device).eval()
    except checkpoint.CheckpointError as error:
        raise UserError(str(error)) from None
