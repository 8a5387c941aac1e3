"""`dormouse train`: begin a run or go on with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dormouse_train.console import Console
from dormouse_train.start import train


def command(
    config: str | None, run: Path | None, *, resume: bool, sets: Sequence[str], overrides: Mapping[str, object]
) -> int:
    """Train and return the exit code: 0 at the end, 130 or 143 where a signal asked to stop."""
    with Console() as console:
        result = train(config, run=run, resume=resume, sets=sets, overrides=overrides, console=console)
    return result.exit_code
