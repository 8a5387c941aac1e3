"""A picture of a run: its loss, bits per byte, rates and expert load over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dormouse_train.errors import UserError, missing_extra
from dormouse_train.metrics import Value, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (
    ("loss, nats a byte", {"loss": "before the update"}),
    ("bits a byte", {"train_bpb": "training rows", "heldout_bpb": "held out"}),
    ("learning rate", {"lr": "train.lr times the schedule"}),
    ("gradient norm", {"grad_norm": "before the clip"}),
    ("bytes a second", {"bytes_per_second": "in steps"}),
    ("expert load", {"max_expert_load": "busiest over mean", "dead_experts": "experts that no byte chose"}),
)
"""The title of each panel, and what it shows by the keys of `metrics.jsonl`."""

Line = dict[str, Value]


def save(run: Path, file: Path) -> None:
    """Draw the metrics of `run` to `file`, a PNG or what else its suffix says.

    Errors: `UserError` for a run without metrics, a suffix that names no picture, or without the extra `plot`.
    """
    lines = read(run)
    if not lines:
        raise UserError(f"--plot: {run} has no metrics yet; train it past its first step")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("--plot: a picture is asked for", "matplotlib", "plot") from None
    drawn = figure(Figure(figsize=(12, 6), layout="constrained"), lines, run.name)
    try:
        drawn.savefig(file)
    except ValueError as error:  # how it refuses a suffix
        kinds = ", ".join(sorted(drawn.canvas.get_supported_filetypes()))
        raise UserError(f"--plot: {file} is no picture by its name ({kinds} are); {str(error)[:60]}") from None


def figure(empty: Figure, lines: Sequence[Line], title: str) -> Figure:
    """`empty` with every panel drawn from `lines` of `metrics.jsonl`; a step that has no finite value is a gap."""
    empty.suptitle(title)
    grid = empty.subplots(2, 3)
    for axes, (name, keys) in zip(grid.flat, PANELS, strict=True):
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        for key, label in keys.items():
            _draw(axes, lines, key, label)
        if axes.lines:
            axes.legend(fontsize="small")
    return empty


def _draw(axes: Axes, lines: Sequence[Line], key: str, label: str) -> None:
    steps, values = ([_number(line[name]) for line in lines if key in line] for name in ("step", key))
    if steps:
        few = len(steps) <= 50  # points that a line alone would hide
        axes.plot(steps, values, marker="." if few else None, label=label)


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
