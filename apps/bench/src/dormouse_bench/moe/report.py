"""What was measured, as text: one table for a terminal or a page, speeds beside the peers, what is absent and why."""

from __future__ import annotations

from collections.abc import Sequence

from dormouse_bench.moe.arms import OURS
from dormouse_bench.moe.costs import Rates
from dormouse_bench.moe.measure import Measured
from dormouse_bench.moe.suite import Result

COLUMNS = (
    "shape", "phase", "implementation", "ms", "GB/s", "TFLOP/s", "floor", "x floor", "expanded floor", "x expanded",
    "extra MiB", "syncs", "dropped", "worst error",
)  # fmt: skip
WORDS = 3
"""Columns that are words and not numbers."""


def table(results: Sequence[Result], rates: Rates) -> str:
    """The Markdown table of all results; an arm that disagrees has its time and no ratio.

    GB/s are of the bytes that the pass must move without expanded rows, TFLOP/s of its useful operations.
    """
    rule = ["---"] * WORDS + ["---:"] * (len(COLUMNS) - WORDS)
    lines = [COLUMNS, rule, *(cells(result, each, rates) for result in results for each in result.measured)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(result: Result, each: Measured, rates: Rates) -> tuple[str, ...]:
    """One line of the table."""
    parts = result.costs(each.phase)
    floors = [result.floor(each.phase, rates, expanded=expanded) for expanded in (False, True)]
    ratios = ["" if floor is None or each.disagreement else f"{each.ms / floor:.2f}" for floor in floors]
    moved, computed = sum(part.bytes for part in parts), sum(part.flops for part in parts)
    return (
        result.name,
        each.phase,
        each.implementation,
        _digits(each.ms),
        f"{moved / each.ms / 1e6:.0f}" if parts else "",
        _digits(computed / each.ms / 1e9) if parts else "",
        "" if floors[0] is None else _digits(floors[0]),
        ratios[0],
        "" if floors[1] is None else _digits(floors[1]),
        ratios[1],
        "" if each.peak_extra_bytes is None else f"{each.peak_extra_bytes / 2**20:.0f}",
        "" if each.syncs is None else str(each.syncs),
        f"{each.dropped:.2%}" if each.dropped else "",
        f"{each.worst:.1e}" + (" disagrees" if each.disagreement else ""),
    )


def summary(result: Result) -> list[str]:
    """The routing, the speed of ours beside the fastest others that agree, the noise, and what is absent."""
    lines = [f"{result.name}: {result.loads}"]
    for phase in ("fwd", "fwd+bwd"):
        lines += _speed(result, phase)
    if result.noise is not None:
        lines.append(f"{result.name}: {OURS} fwd+bwd twice differs by {result.noise:.1%}")
    lines += [f"{result.name}: absent: {each.name}: {each.reason}" for each in result.absent]
    return lines + [f"{sentence}; its times are not compared" for sentence in result.disagreements()]


def _speed(result: Result, phase: str) -> list[str]:
    """How we stand beside the fastest other that computes every row, and beside one that drops some and is faster."""
    agreeing = [each for each in result.measured if each.phase == phase and not each.disagreement]
    mine = next((each for each in agreeing if each.implementation == OURS), None)
    others = sorted((each for each in agreeing if each.implementation != OURS), key=lambda each: each.ms)
    if mine is None or not others:
        return []
    whole = next((each for each in others if not each.dropped), None)
    beside = others[:1] if whole is None or whole is others[0] else [whole, others[0]]
    return [f"{result.name} {phase}: {OURS} {_digits(mine.ms)} ms, {_beside(mine, each)}" for each in beside]


def _beside(mine: Measured, other: Measured) -> str:
    drops = f", which drops {other.dropped:.2%} of the rows" if other.dropped else ""
    return f"{other.ms / mine.ms:.2f} times as fast as {other.implementation} ({_digits(other.ms)} ms{drops})"


def _digits(value: float) -> str:
    """Four digits say all that a median knows; no exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}" if value >= 1e-3 else f"{value:.6f}"
