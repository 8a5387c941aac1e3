"""TensorBoard's view of `metrics.jsonl`: the same numbers as event files in `events/` of the run."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dormouse_train.errors import missing_extra
from dormouse_train.metrics import Value, read

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

FOLDER = "events"
NOT_SHOWN = frozenset({"step", "window_bytes"})


def require() -> None:
    """Errors: `UserError` where TensorBoard is not installed, before anything is imported."""
    if importlib.util.find_spec("tensorboard") is None:
        raise missing_extra("log.tensorboard is true", "tensorboard", "tensorboard")


@contextmanager
def opened(run: Path) -> Generator[Events]:
    """The events of `run`, with all that `metrics.jsonl` holds by now, to be written to; whole when it is left."""
    from torch.utils.tensorboard.writer import SummaryWriter

    # Made anew from metrics.jsonl, which a resume cuts back: events that were written cannot be taken back.
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    with SummaryWriter(str(run / FOLDER)) as writer:
        events = Events(writer)
        for line in read(run):
            events.write(line)
        yield events


class Events:
    """Scalars by the keys of `metrics.jsonl`; the counters below `counters/`."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def write(self, values: Mapping[str, Value]) -> None:
        """One line of `metrics.jsonl`; what is null or no number is left out."""
        for key, value in values.items():
            if key not in NOT_SHOWN and isinstance(value, int | float):
                self._writer.add_scalar(key.replace("counters.", "counters/", 1), value, values["step"])
