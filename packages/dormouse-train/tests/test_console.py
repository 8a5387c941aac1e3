"""The console: what is printed where there is no terminal, what a terminal gets, and what never reaches it."""

from __future__ import annotations

import dataclasses
import io
import re
import time

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
        "step 20/400  loss 2.5000  train 3.607 BPB  41.2 kB/s  ETA 1:32  812 MB  "
        "rate 2.00e-02  |g| 0.50  load 1.8x  dead 1/32\n"
    )
    assert file.getvalue() == line * 2


def test_skipped_steps_are_shown_before_what_may_be_left_out_when_there_are_any() -> None:
    line = dataclasses.replace(STATUS, skipped=3).line(80)
    assert line.startswith("step 20/400  loss 2.5000  train 3.607 BPB  41.2 kB/s  ETA 1:32  skipped 3")
    assert "skipped" not in STATUS.line()


def screen(out: str) -> list[str]:
    """What stands on a terminal after `out`: carriage returns, lines up and erased lines are obeyed."""
    rows, at, column = [""], 0, 0
    for code, erased, up, newline, char in re.findall(r"(\x1b\[\?25[lh])|(\x1b\[2K)|\x1b\[(\d+)A|(\n)|([^\x1b])", out):
        if erased:
            rows[at] = ""
        elif up:
            at -= int(up)
        elif newline:
            at, column = at + 1, 0
            rows += [""] * (at == len(rows))
        elif char == "\r":
            column = 0
        elif not code:
            rows[at] = rows[at][:column].ljust(column) + char + rows[at][column + 1 :]
            column += 1
    return rows


def on_terminal(width: int, statuses: list[tuple[int, bool]]) -> tuple[str, str]:
    """What a terminal of `width` columns was sent for (step, lasting) statuses: while they went on, and in all."""
    file = io.StringIO()
    with Console(file, live=True, width=width) as console:
        for step, lasting in statuses:
            console.status(dataclasses.replace(STATUS, step=step), lasting=lasting)
            time.sleep(0.3)  # a live line is drawn four times a second
        during = file.getvalue()
    return during, file.getvalue()


def test_a_terminal_keeps_the_lasting_lines_and_has_a_live_one_below_until_the_end() -> None:
    during, whole = on_terminal(80, [(20, True), (21, False), (40, True), (41, False)])
    steps = [row.split()[1] for row in screen(during) if row]
    assert steps == ["20/400", "40/400", "41/400"]
    assert [row.split()[1] for row in screen(whole) if row] == ["20/400", "40/400"]
    assert "step 21/400" in during
    assert whole.index("\x1b[?25l") < whole.rindex("\x1b[?25h")


@pytest.mark.parametrize("line", ["lasting", "live"])
def test_eighty_columns_hold_step_loss_score_speed_and_eta_whole_and_no_part_of_another(line: str) -> None:
    status = dataclasses.replace(
        STATUS, step=98_765, steps=100_000, loss=12.5, train_bpb=12.345, bytes_per_second=1_234_500, eta_seconds=86_399
    )
    file = io.StringIO()
    with Console(file, live=True, width=80) as console:
        console.status(status, lasting=line == "lasting")
        if line == "live":
            time.sleep(0.3)
        (row,) = {row for row in screen(file.getvalue()) if row}
    assert row == "step 98765/100000  loss 12.5000  train 12.345 BPB  1234.5 kB/s  ETA 23:59:59"


@pytest.mark.parametrize(
    ("width", "last"), [(8, "step 20/400"), (40, "loss 2.5000"), (80, "812 MB"), (200, "dead 1/32")]
)
def test_what_a_terminal_has_no_room_for_is_left_out_whole(width: int, last: str) -> None:
    line = STATUS.line(width)
    assert line.endswith(last)
    assert STATUS.line().startswith(line)


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
