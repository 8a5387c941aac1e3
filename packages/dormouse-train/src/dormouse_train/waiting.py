"""What takes long and prints nothing by itself is announced on stderr, so that stdout holds results alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


@contextmanager
def waiting(what: str, nbytes: int, *, counted: bool = True) -> Generator[Callable[[int], None]]:
    """Say `what` is being done with how many bytes: a line, or on a terminal a bar that is gone when it is done.

    Yields a function to call with the number of bytes done since its last call; `counted` is false where nobody will.
    """
    text = f"{what}: {nbytes:,} bytes"
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        print(text, file=sys.stderr, flush=True)
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True) as bar:
        yield partial(bar.advance, bar.add_task(text, total=nbytes if counted else None))
