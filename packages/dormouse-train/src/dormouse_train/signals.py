"""Stop requests: a handler only takes note, the loop asks once a step and saves before it leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"
NOTHING_KEPT = "stopped before the first step; nothing was kept"
AS_IT_WAS = "stopped before a step; the run is as it was"


class StopRequested(Exception):
    """What was being done is given up because the run was asked to stop."""


class Signals:
    """`with Signals() as signals:` makes SIGINT and SIGTERM a request, `signals.requested`, instead of an end.

    `requested` is the number of the first such signal, or None; `exit_code` is 130 or 143 accordingly. A second SIGINT
    ends the process at once with 130, nothing saved. The handlers before are put back on leaving. Outside the main
    thread Python cannot handle signals: nothing is installed and nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def exit_code(self) -> int:
        """128 + the signal that was asked for, 0 where none was."""
        return 0 if self.requested is None else 128 + self.requested

    def check(self) -> None:
        """`StopRequested` once a stop was asked for: what may be given up calls this now and then."""
        if self.requested is not None:
            raise StopRequested

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            leave_at_once(number)
        if self.requested is None:
            self.requested = int(number)


def leave_at_once(number: int) -> None:
    """End the process with 128 + `number`: no cleaning up, but for a terminal's cursor that a live line has hidden."""
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, SHOW_CURSOR)
    os._exit(128 + number)


def tell(text: str) -> None:
    """A line on stderr; a signal's handler may call it, whatever it interrupts."""
    os.write(2, f"{text}\n".encode())


@contextmanager
def before_leaving(action: Callable[[], None]) -> Generator[None]:
    """While the block runs a signal of `leave_on_signals` calls `action` before it ends the process.

    Handlers that others installed stay as they are: Python's own for SIGINT raises, and ends the block that way.
    """
    before = {number: signal.getsignal(number) for number in STOPPING}
    ending = {number: handler for number, handler in before.items() if isinstance(handler, _Leave)}
    in_main = threading.current_thread() is threading.main_thread()
    for number in ending if in_main else ():
        signal.signal(number, _Leave(action))
    try:
        yield
    finally:
        for number, handler in ending.items() if in_main else ():
            signal.signal(number, handler)


@dataclass(frozen=True)
class _Leave:
    """A handler that ends the process at once, after `first`."""

    first: Callable[[], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            with suppress(Exception):  # leaving matters more than leaving nothing behind
                self.first()
        leave_at_once(number)


def leave_on_signals() -> Callable[[], None]:
    """Until the training loop takes over there is nothing to save: SIGINT and SIGTERM end the process at once.

    Returns a function that puts the handlers before back. A KeyboardInterrupt instead could be swallowed, or shown as a
    traceback, wherever in the import of a large library it lands.
    """
    before = {number: signal.signal(number, _Leave()) for number in STOPPING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore
