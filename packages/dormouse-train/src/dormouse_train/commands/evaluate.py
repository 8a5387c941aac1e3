"""`dormouse eval`: bits per byte on held-out or on given bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dormouse_train import run_folder
from dormouse_train.commands import trained
from dormouse_train.config import EvalSection, assemble
from dormouse_train.data import ByteView, Corpus, open_corpus, open_paths
from dormouse_train.errors import UserError
from dormouse_train.waiting import waiting

if TYPE_CHECKING:
    from dormouse_model import Dormouse


def command(run: Path, data: Sequence[str], window: int | None = None, *, test: bool = False) -> int:
    """Print one line: the score, and how many bytes of what it was measured on.

    At most `window` bytes are scored (0: all); None means as many as at the end of the run, or of a run by default.
    `test` means the part of the run's data that is kept for a test. Errors: `UserError` where it has none.
    """
    if data and test:
        raise UserError("--test: --data gives other bytes to score; leave one of the two out")
    if data:
        name, view, wanted = ", ".join(data), _mapped(data, run), EvalSection().final_window_bytes
        config, model = trained.load(run)
    else:
        config, model = trained.load(run)
        name, view = _kept(open_corpus(config.data, run), test=test)
        wanted = config.eval.final_window_bytes
    print(_line(model, view, wanted if window is None else window, name), flush=True)
    return 0


def _mapped(data: Sequence[str], run: Path) -> ByteView:
    """The bytes to score: what had to be unpacked stays mapped when its folder goes, and so cannot be left behind."""
    text_field = assemble(run_folder.tables(run, argument="RUN")).data.text_field
    with TemporaryDirectory(prefix="dormouse-") as scratch:
        return open_paths(data, Path(scratch), text_field)


def _kept(corpus: Corpus, *, test: bool) -> tuple[str, ByteView]:
    """The bytes of a run that it is not trained on, and what they are called."""
    if test and not len(corpus.test):
        raise UserError(f"--test: {corpus.name} keeps no bytes for a test, as enwik8 does; leave out --test")
    return (f"test part of {corpus.name}", corpus.test) if test else (f"held out of {corpus.name}", corpus.heldout)


def _line(model: Dormouse, view: ByteView, wanted: int, name: str) -> str:
    from dormouse_train.evaluate import evaluate, window

    with waiting("evaluating", window(len(view), wanted).nbytes) as advance:
        scored = evaluate(model, view, wanted, advance=advance)
    return f"{scored.bpb:.4f} BPB over {scored.window_bytes:,} bytes ({name})"
