"""The folder of a run: made once, and opened again only with the configuration it was begun with."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from dormouse_model.layout import CHECKPOINTS, latest_step

from dormouse_train.config import (
    PROGRESS_KEYS,
    Config,
    assemble,
    read_resolved,
    refused_on_resume,
    to_toml,
)
from dormouse_train.errors import UserError

RUNS = Path("runs")
CONFIG = "config.toml"
LOCK = ".lock"
START = frozenset({LOCK, "data", "data.json", "data.json.tmp", f"{CONFIG}.tmp"})
"""What a run holds before its `config.toml` is written."""
PACKS = frozenset(
    f"{side}.{kind}{state}" for side in ("train", "heldout") for kind in ("bin", "documents") for state in ("", ".tmp")
)
"""What `data/` of a run may hold."""


def create(run: Path | None = None) -> Path:
    """Make `run`, or a new folder under `runs/` named by date and time; an empty one or an interrupted start will do.

    Errors: `UserError` where `run` is a file or a folder with anything else in it.
    """
    if run is None:
        return _dated(RUNS)
    _refuse_taken(run)
    if run.exists() and not run.is_dir():
        raise UserError(f"--run: {run} is a file; give a folder")
    run.mkdir(parents=True, exist_ok=True)
    return run


def _refuse_taken(run: Path) -> None:
    if not run.is_dir() or not any(run.iterdir()) or is_interrupted_start(run):
        return
    if holds_run(run):
        raise UserError(f"--run: {run} exists; add --resume to go on with it, or give another folder")
    raise UserError(f"--run: {run} is no run and holds other files; give a new or an empty folder")


def is_interrupted_start(run: Path) -> bool:
    """Whether `run` holds what a run writes before its `config.toml`, and not one file more: nobody's but ours."""
    if not (run / LOCK).is_file():
        return False
    names = {path.name for path in run.iterdir()}
    packed = {path.name for path in (run / "data").iterdir()} if (run / "data").is_dir() else set()
    return names <= START and packed <= PACKS


def clear_start(run: Path) -> None:
    """Remove what an interrupted start left in `run`, for whoever holds its lock, which stays.

    Errors: `UserError` where another process has begun the run since `create` looked.
    """
    _refuse_taken(run)
    for name in START - {LOCK}:
        if name == "data":
            shutil.rmtree(run / name, ignore_errors=True)
        else:
            (run / name).unlink(missing_ok=True)


def undo(run: Path, *, made: bool) -> None:
    """Remove what a start has written so far, and the folder itself where it was `made` for the run."""
    (run / CONFIG).unlink(missing_ok=True)
    clear_start(run)
    (run / LOCK).unlink(missing_ok=True)
    if made:
        run.rmdir()


def holds_run(run: Path) -> bool:
    """Whether a folder is that of a run, or what is left of one: nothing in it is text to train on."""
    if (run / "data.json").is_file() and ((run / CONFIG).is_file() or (run / LOCK).is_file()):
        return True
    return any((run / CHECKPOINTS).glob("step-*/manifest.json")) or is_interrupted_start(run)


def _dated(runs: Path) -> Path:
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for number in range(1, 1000):
        run = runs / (name if number == 1 else f"{name}-{number}")
        try:
            run.mkdir(parents=True)
        except FileExistsError:
            continue
        return run
    raise UserError(f"--run: {runs} has a thousand runs of this second; give a folder")


def newest(runs: Path = RUNS) -> Path:
    """The run that a `--resume` without `--run` means: the one under `runs/` that was begun or resumed last."""
    run = _newest(runs)
    if run is None:
        raise UserError(f"--resume: there is no run under {runs}/ to go on with; give --run FOLDER")
    return run


def _newest(runs: Path) -> Path | None:
    found = max(runs.glob(f"*/{CONFIG}"), key=lambda path: (path.stat().st_mtime_ns, path), default=None)
    return None if found is None else found.parent


def tables(run: Path, *, argument: str = "--run") -> dict[str, Any]:
    """The tables of `run/config.toml`.

    Errors: `UserError` where `run` is not the folder of a run, naming the `argument` that it came from.
    """
    if not run.is_dir():
        what = "is no folder" if run.exists() else "does not exist"
        raise UserError(f"{argument}: {run} {what}; give the folder of a run")
    if (run / CONFIG).is_file():
        return read_resolved(run / CONFIG)
    if is_interrupted_start(run):
        raise UserError(f"{argument}: the start of {run} was interrupted; begin it anew without --resume")
    below = _newest(run)
    raise UserError(
        f"{argument}: {run} is not a run, as it holds no {CONFIG}; "
        f"give the folder of a run{'' if below is None else f', such as {below}'}"
    )


def reopen(run: Path, asked: Config) -> None:
    """Let `run` go on as `asked`, writing its `config.toml` anew.

    Errors: `UserError` with every difference that is not one of progress: the run would not be the one it was.
    """
    saved = assemble(tables(run))
    step = latest_step(run) or 0
    refused = refused_on_resume(saved, asked, step)
    if refused:
        listed = ", ".join(f"{key} = {_shown(old)} (now {_shown(new)})" for key, (old, new) in refused.items())
        raise UserError(f"--resume: {run} was begun with {listed}; {_way_out(refused, saved, step)}")
    write_config(run, asked)


def _way_out(refused: dict[str, Any], saved: Config, step: int) -> str:
    if refused.keys() != {"train.steps"}:
        free = ", ".join(sorted(PROGRESS_KEYS))
        return f"leave that as it was or start a new run (free to change: {free}, and train.steps before a wsd decay)"
    if saved.train.decay_begins is None:
        return "only the wsd schedule can change its length; leave train.steps as it was or start a new run"
    return (
        f"a length may change only before a decay begins (at step {saved.train.decay_begins} as it was, the run is at "
        f"{step}); leave train.steps as it was or start a new run"
    )


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


@contextmanager
def locked(run: Path) -> Generator[None]:
    """Hold `run` against a second process that would write to it; the lock goes with the process, however it ends.

    Errors: `UserError` where another process holds it.
    """
    with (run / LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--run: {run} is being trained by another process; wait for it or stop it") from None
        yield


def write_config(run: Path, config: Config) -> None:
    """Write `run/config.toml`, whole or not at all."""
    with replacing(run / CONFIG) as file:
        file.write(to_toml(config).encode())


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends, synced: whole, or not at all.

    Until then it is `path` with `.tmp` behind, and `path` is what it was.
    """
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
