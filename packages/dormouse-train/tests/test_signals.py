from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from dormouse_train.signals import Signals

LOOP = """
import sys, time
from dormouse_train.signals import Signals
with Signals() as signals:
    print("ready", flush=True)
    while signals.requested is None:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(float(sys.argv[1]))
print("saved", flush=True)
sys.exit(signals.exit_code)
"""

START = """
import time
from dormouse_train.signals import leave_on_signals
leave_on_signals()
print("ready", flush=True)
try:
    time.sleep(30)
except BaseException:
    print("swallowed", flush=True)
"""


INTERRUPTED = """
import signal
from dormouse_train.signals import leave_on_signals
leave_on_signals()
signal.raise_signal(signal.SIGINT)
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_request_and_the_exit_code_names_it(number: signal.Signals, code: int):
    process = started(LOOP, "0")
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("asked\nsaved\n", code)


def test_a_second_sigint_leaves_at_once():
    process = started(LOOP, "30")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert (out, process.returncode) == ("", 130)


def test_a_sigterm_while_a_save_runs_does_not_cut_it_off():
    process = started(LOOP, "0.5")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (out, process.returncode) == ("saved\n", 130)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_start_up_leaves_without_a_traceback(number: signal.Signals, code: int):
    process = started(START)
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert (out, process.returncode) == ("", code)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_leaving_at_once_gives_a_terminal_its_cursor_back(stream: str):
    ours, theirs = pty.openpty()
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: theirs}
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=piped["stdout"], stderr=piped["stderr"])
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 4096):
            seen += part
    assert process.wait(20) == 130
    assert b"\x1b[?25h" in seen


def test_the_handlers_before_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_nothing_is_installed_and_nothing_raised():
    seen: list[object] = []

    def body() -> None:
        with Signals() as signals:
            seen.extend([signal.getsignal(signal.SIGINT), signals.requested, signals.exit_code])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT), None, 0]
