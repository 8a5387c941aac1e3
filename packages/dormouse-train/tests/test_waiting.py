"""What is said on stderr while something takes long: a line, or on a terminal a bar that leaves nothing behind."""

from __future__ import annotations

import io
import sys

import pytest
from dormouse_train.waiting import waiting


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_where_there_is_no_terminal_it_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("evaluating", 420_229) as advance:
        assert capsys.readouterr() == ("", "evaluating: 420,229 bytes\n")
        advance(1000)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("counted", [True, False])
def test_a_terminal_sees_how_far_it_is_and_keeps_no_line(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with waiting("evaluating [all]", 400, counted=counted) as advance:
        if counted:
            advance(100)
    sent = screen.getvalue()
    assert "evaluating [all]: 400 bytes" in sent
    assert ("25%" in sent) is counted
    assert sent.endswith("\x1b[1A\x1b[2K")  # the line is erased, after the cursor is back
    assert sent.index("\x1b[?25l") < sent.index("\x1b[?25h")
