"""The console: what is printed where there is no terminal, what a terminal gets, and what never reaches it."""

from __future__ import annotations

import dataclasses
import io

import pytest
from dormouse_train.baselines import Baselines
from dormouse_train.console import Console, Status, duration, shown
from dormouse_train.evaluate import Evaluation
from dormouse_train.optim.optimizer import Row

STATUS = Status(
    step=20,
    steps=400,
    loss=2.5,
    train_bpb=3.6067,
    lr=0.02,
    grad_norm=0.5,
    max_expert_load=1.75,
    dead_experts=1,
    experts=32,
    bytes_per_second=41_230.0,
    memory_bytes=812_000_000,
    eta_seconds=92.4,
    skipped=0,
)


def plain() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file), file


def test_a_file_gets_one_plain_line_a_status_and_no_control_character() -> None:
    console, file = plain()
    console.status(STATUS)
    console.status(STATUS)
    line = (
        "step 20/400  loss 2.5000  train 3.607 BPB  rate 2.00e-02  |g| 0.50  load 1.8x  dead 1/32  "
        "41.2 kB/s  812 MB  ETA 1:32\n"
    )
    assert file.getvalue() == line * 2


def test_skipped_steps_are_shown_when_there_are_any() -> None:
    assert dataclasses.replace(STATUS, skipped=3).line().endswith("skipped 3")


def test_a_terminal_gets_a_live_line_that_is_replaced_and_the_cursor_back() -> None:
    file = io.StringIO()
    with Console(file, live=True, width=200) as console:
        console.status(STATUS)
        console.status(dataclasses.replace(STATUS, step=21))
        console.note("kept")
    out = file.getvalue()
    assert "\x1b[?25l" in out
    assert out.index("\x1b[?25l") < out.rindex("\x1b[?25h")
    assert "step 21/400" in out
    assert "kept" in out


def test_a_live_line_is_cut_to_a_narrow_terminal() -> None:
    file = io.StringIO()
    with Console(file, live=True, width=40) as console:
        console.status(STATUS)
    assert "…" in file.getvalue()
    assert "ETA" not in file.getvalue()


def test_long_plain_lines_are_not_folded() -> None:
    console, file = plain()
    console.note("x" * 500)
    assert file.getvalue() == "x" * 500 + "\n"


def test_brackets_and_colons_of_a_sample_are_not_markup() -> None:
    console, file = plain()
    console.sample(b"[bold]", b"x = a[:smile:] [/red]\nlast")
    assert file.getvalue() == "sample\n  | [bold]x = a[:smile:] [/red]\n  | last\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"caf\xc3\xa9\n\tok", "café\n\tok"),
        (b"\xff\xfe", r"\xff\xfe"),
        (b"caf\xc3", r"caf\xc3"),
        (b"\x1b[2J\x07\r\x00", r"\x1b[2J\x07\r\x00"),
        ("\u202e\u2028\x9b".encode(), r"\u202e\u2028\x9b"),
    ],
)
def test_bytes_are_shown_without_anything_a_terminal_would_obey(data: bytes, text: str) -> None:
    assert shown(data) == text


def test_an_output_that_is_not_utf8_gets_escapes_instead_of_an_error() -> None:
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    console.sample(b"", "é".encode())
    assert raw.getvalue() == b"sample\n  | \\xe9\n"


def test_the_report_sets_the_model_beside_every_baseline_on_the_same_bytes() -> None:
    console, file = plain()
    console.report(Evaluation(2.45, 587_928), Baselines([4.71, 3.6, 2.0], 1.3, 1000, 1000, 587_928))
    assert file.getvalue().splitlines() == [
        "on the same 587,928 held-out bytes, in bits a byte (BPB), the others fitted on",
        "all 1,000 training bytes:",
        "  this model                   2.450",
        "  unigram                      4.710  beaten",
        "  n-gram, 1 byte of context    3.600  beaten",
        "  n-gram, 2 bytes of context   2.000",
        "  xz(train+held) - xz(train)   1.300",
    ]


def test_baselines_fitted_on_a_part_say_which_part() -> None:
    console, file = plain()
    console.report(Evaluation(2.45, 10), Baselines([4.71], 1.3, 1000, 5_000, 10))
    assert "\n1,000 of the 5,000 training bytes:\n" in file.getvalue()


def test_a_quiet_console_shows_nothing() -> None:
    file = io.StringIO()
    with Console(file, live=True, quiet=True) as console:
        console.note("text")
        console.status(STATUS)
    assert file.getvalue() == ""


def test_groups_are_a_table_with_every_number() -> None:
    console, file = plain()
    console.groups([Row("factors", "factor", 4, 300_000, 0.02, 0.0)])
    head, row = file.getvalue().splitlines()
    assert head.split() == ["group", "update", "tensors", "numbers", "rate", "decay"]
    assert row.split() == ["factors", "factor", "4", "300,000", "2.00e-02", "0"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (-3, "0:00"), (7325, "2:02:05")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
