"""`metrics.jsonl`: one flat JSON object a line, in the order of the steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from dormouse_train.run_folder import replacing

NAME = "metrics.jsonl"

Value = int | float | str | bool | None


class Metrics:
    """`Metrics(run).write({"step": 10, "loss": 1.5})` appends a line to `run/metrics.jsonl`.

    Keys are flat and every line has `step`. A number that is not finite is written as null: JSON has no NaN.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        self.also: list[Callable[[Mapping[str, Value]], None]] = []
        """What else is given every line, once it is written."""

    def write(self, values: Mapping[str, Value]) -> None:
        """Append one line; `values` holds `step` and plain values."""
        line = {"step": values["step"]} | {key: _plain(value) for key, value in values.items()}
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
        for tell in self.also:
            tell(line)

    def cut_back(self, step: int) -> None:
        """Drop every line after `step`, and a last line that a killed process left unfinished."""
        if not self.path.exists():
            return
        with self.path.open("rb") as old, replacing(self.path) as new:
            for line in old:
                at = _step(_parse(line))
                if at is not None and at <= step:
                    new.write(line)


def read(run: Path) -> list[dict[str, Value]]:
    """The lines of a run, oldest first; an unfinished last line is left out."""
    path = run / NAME
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [written for line in file if (written := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Value] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        written = json.loads(line)
    except ValueError:
        return None
    return written if _step(written) is not None else None


def _step(written: object) -> int | None:
    """The step of a line as this module writes it; None for anything else."""
    if not isinstance(written, dict) or not all(isinstance(value, Value) for value in written.values()):
        return None
    step = written.get("step")
    return step if isinstance(step, int) else None


def _plain(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = [
    "Metrics",
    "Value",
    "read",
]
