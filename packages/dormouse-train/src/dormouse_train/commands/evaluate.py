"""`dormouse eval`: bits per byte on held-out or on given bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dormouse_train.commands import trained
from dormouse_train.config import EvalSection
from dormouse_train.data import ByteView, open_corpus, open_paths

if TYPE_CHECKING:
    from dormouse_model import Dormouse


def command(run: Path, data: Sequence[str], window: int | None = None) -> int:
    """Print one line: the score, and how many bytes of what it was measured on.

    At most `window` bytes are scored (0: all); None means as many as at the end of the run, or of a run by default.
    """
    name, view, wanted = ", ".join(data), _mapped(data), EvalSection().final_window_bytes
    config, model = trained.load(run)
    if view is None:
        corpus = open_corpus(config.data, run)
        name, view, wanted = f"held out of {corpus.name}", corpus.heldout, config.eval.final_window_bytes
    print(_line(model, view, wanted if window is None else window, name), flush=True)
    return 0


def _mapped(data: Sequence[str]) -> ByteView | None:
    """The bytes to score: what had to be unpacked stays mapped when its folder goes, and so cannot be left behind."""
    if not data:
        return None
    with TemporaryDirectory(prefix="dormouse-") as scratch:
        return open_paths(data, Path(scratch))


def _line(model: Dormouse, view: ByteView, wanted: int, name: str) -> str:
    from dormouse_train.evaluate import evaluate

    scored = evaluate(model, view, wanted)
    return f"{scored.bpb:.4f} BPB over {scored.window_bytes:,} bytes ({name})"
