"""The console scripts: signals before anything else, then a command, its exit code, and errors as one sentence."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from dormouse_train.errors import UserError, out_of_memory
from dormouse_train.signals import leave_on_signals

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def main() -> NoReturn:
    """The console script `dormouse`."""
    leave_on_signals()
    from dormouse_train.app import dormouse

    _run(dormouse())


def train_main() -> NoReturn:
    """The console script `train`, the same as `dormouse train`."""
    leave_on_signals()
    from dormouse_train.app import train_alone

    _run(train_alone())


def _run(app: Callable[..., int]) -> NoReturn:
    """Run a command and leave with its exit code; what a user can mend is one sentence on stderr and 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 shows an escape, not a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
    except BrokenPipeError:  # the reader of stdout left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + 13
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        code = UserError.exit_code
    sys.exit(code)


def _sentence(error: Exception) -> str | None:
    """What a user reads of `error`; None where it is a fault of the program, whose traceback is needed."""
    if isinstance(error, UserError):
        return str(error)
    usage = getattr(error, "format_message", None)
    if usage is not None:  # only typer's own errors have it, whose base class has no public name
        return f"{usage().rstrip('.')}; --help lists the options"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        mend = "free space or lift the limit; --resume goes on from the last checkpoint" if error.errno in FULL else ""
        return f"{where}{error.strerror[0].lower()}{error.strerror[1:]}; {mend or 'mend that and try again'}"
    if (memory := out_of_memory(error)) is not None:
        return f"{memory}; give fewer bytes, use a smaller model, or free memory"
    from dormouse_model.config import ConfigError

    known: tuple[type[Exception], ...] = (ConfigError,)
    if isinstance(error, RuntimeError):  # the model has been imported by then
        from dormouse_model.kda.selection import FallbackRefused

        known = (ConfigError, FallbackRefused)
    return str(error) if isinstance(error, known) else None
