"""Rows as a picture: a bar for each arm, the floor as a line. matplotlib is an optional dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from dormouse_bench.moe.arms import OURS
from dormouse_bench.rows import Row

PHASE = "fwd+bwd"


def check() -> None:
    """Errors: `ValueError` with the mend where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("bench moe: --picture needs matplotlib; run with `uv run --group picture`")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes a panel a shape: milliseconds of every arm's forward with backward, fastest first, the floor dashed."""
    from matplotlib.figure import Figure

    chosen = [row for row in rows if row.bench == "moe" and row.phase == PHASE]
    shapes = list(dict.fromkeys(row.shape for row in chosen))
    if not shapes:
        return
    figure = Figure(figsize=(8, 0.6 + 0.28 * (len(chosen) + 2 * len(shapes))), layout="constrained")
    heights = [1 + sum(row.shape == shape for row in chosen) for shape in shapes]
    panels = figure.subplots(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, shape in zip(panels, shapes, strict=True):
        bars = sorted((row for row in chosen if row.shape == shape), key=lambda row: row.ms)
        colours = ["tab:orange" if row.implementation == OURS else "tab:gray" for row in bars]
        drawn = panel.barh([row.implementation for row in bars], [row.ms for row in bars], color=colours)
        panel.bar_label(drawn, labels=[f" {row.ms:.3g}" for row in bars])
        floor = bars[0].floor_ms
        if floor is not None:
            panel.axvline(floor, color="black", linestyle="--", linewidth=1)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(f"{shape}, {PHASE}, ms (dashed: the floor)", loc="left", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    where = rows[0]
    figure.suptitle(f"{where.machine}, torch {where.torch}, triton {where.triton}, {where.date}", fontsize=9)
    figure.savefig(path, dpi=150)
