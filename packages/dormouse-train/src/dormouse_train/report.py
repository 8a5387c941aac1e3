"""`report.json` of a run: how it ended, written last, so that a run that is finished is not scored again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dormouse_model.layout import latest_step

from dormouse_train.baselines import Baselines
from dormouse_train.config import Config
from dormouse_train.data import manifest
from dormouse_train.run_folder import replacing

NAME = "report.json"


@dataclass(frozen=True)
class Report:
    """The score of the last step, and what other models reach on the same bytes."""

    step: int
    heldout_bpb: float
    window_bytes: int
    baselines: Baselines
    entropy: float | None
    """Of the source, in bits a byte, where it is known."""

    def save(self, run: Path) -> None:
        """Write it, whole or not at all."""
        with replacing(run / NAME) as file:
            file.write(json.dumps(asdict(self), indent=1).encode())


def kept(run: Path, config: Config) -> Report | None:
    """The report of a run that has nothing left to do; None where steps are left or another window is asked for."""
    step, wanted = config.train.steps, config.eval.final_window_bytes
    if latest_step(run) != step or (report := _read(run / NAME)) is None or not (run / manifest.NAME).is_file():
        return None
    available = manifest.load(run).heldout_bytes
    window_bytes = min(wanted, available) if wanted else available
    return report if (report.step, report.window_bytes) == (step, window_bytes) else None


def _read(path: Path) -> Report | None:
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        return Report(**values | {"baselines": Baselines(**values["baselines"])})
    except (ValueError, TypeError, KeyError):  # not ours, or of another version: the run is scored again
        return None
