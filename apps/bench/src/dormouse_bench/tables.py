"""Rows as a table, for a terminal or for a page, always with where they come from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dormouse_bench.rows import Row

SHOWN = ("bench", "shape", "phase", "implementation", "ms", "floor_ms", "peak_extra_bytes")
NUMBERS = SHOWN[4:]


def cells(row: Row) -> tuple[str, ...]:
    """The shown columns of a row as text; four digits say all that a median knows."""
    extra = "" if row.peak_extra_bytes is None else f"{row.peak_extra_bytes:,}"
    floor = "" if row.floor_ms is None else f"{row.floor_ms:.4g}"
    return row.bench, row.shape, row.phase, row.implementation, f"{row.ms:.4g}", floor, extra


def origins(rows: Sequence[Row]) -> list[str]:
    """Every machine, stack, commit and day that the rows have, each once."""
    lines = (
        f"{row.machine} · torch {row.torch} · triton {row.triton} · commit {row.commit} · {row.date}" for row in rows
    )
    return list(dict.fromkeys(lines))


def show(rows: Sequence[Row]) -> None:
    """Prints the rows to the terminal."""
    table = Table(box=None, pad_edge=False)
    for column in SHOWN:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    console = Console()
    console.print(table)
    for line in origins(rows):
        console.print(line, highlight=False, soft_wrap=True)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table with their origins below it."""
    rule = ["---:" if column in NUMBERS else "---" for column in SHOWN]
    lines = [f"| {' | '.join(line)} |" for line in (SHOWN, rule, *map(cells, rows))]
    return "\n".join([*lines, "", *origins(rows)])
