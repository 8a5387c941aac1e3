"""`bench moe`, between its options and its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dormouse_bench import ceilings, rows, tables
from dormouse_bench.moe import arms, picture, problem, report, suite
from dormouse_bench.moe.costs import Rates
from dormouse_bench.moe.shapes import DEFAULTS, SHAPES
from dormouse_bench.rows import Origin, Row


@dataclass(frozen=True)
class Options:
    """What the command was asked for, as typed."""

    device: str
    shapes: Sequence[str]
    arms: Sequence[str]
    budget_ms: int
    origin: Origin
    trained: Path | None = None
    out: Path | None = None
    markdown: Path | None = None
    picture: Path | None = None


def names(asked: str, device: str) -> list[str]:
    """The shapes of `--shape`, or the device's own. Errors: `ValueError` with the list."""
    found = [name.strip() for name in asked.split(",") if name.strip()] or list(DEFAULTS[device])
    for name in found:
        if name not in SHAPES:
            raise ValueError(f"bench moe: --shape has {name!r}; choose from {', '.join(SHAPES)}")
    return found


def only(asked: str, shapes: Sequence[str], device: str) -> list[str]:
    """The implementations of `--arms`; none means all. Errors: `ValueError` for one that none of the shapes has."""
    found = [name.strip() for name in asked.split(",") if name.strip()]
    if not found:
        return []
    listed = [each for shape in shapes for group in arms.arms(SHAPES[shape], device) for each in group]
    known = list(dict.fromkeys(each.name for each in listed))
    for name in found:
        if name not in known:
            raise ValueError(f"bench moe: --arms has {name!r}; choose from {', '.join(known)}")
    return found


def run(options: Options) -> list[str]:
    """Measures, prints, writes; returns the sentences of arms that disagree with the reference.

    Files are written after every shape, so that a run that is stopped keeps what it has.
    """
    trained = None if options.trained is None else problem.read_indices(options.trained)
    for name in options.shapes:
        if SHAPES[name].routing == "trained":
            problem.indices(SHAPES[name], "cpu", trained=trained)  # refused before anything is measured
    if options.picture is not None:
        picture.check()
    kept = [ceiling.row for ceiling in ceilings.ceilings(options.device, 10, options.origin)]
    rates = rates_of(kept)
    results: list[suite.Result] = []
    for name in options.shapes:
        results.append(_one(name, trained, options))
        kept += results[-1].rows(rates, options.origin)
        _write(results, kept, rates, options)
    print(report.table(results, rates))
    for line in notes(results, kept, rates):
        print(line)
    return [sentence for result in results for sentence in result.disagreements()]


def rates_of(kept: Sequence[Row]) -> Rates:
    """The ceilings among the rows. Errors: `ValueError` where a file has none."""
    found = {row.phase: ceilings.rate(row) for row in kept if row.bench == "ceilings"}
    if not {"copy", "gemm"} <= found.keys():
        raise ValueError("bench: the results hold no ceilings; pass a file that `bench moe --out` wrote")
    return Rates(bytes_per_second=found["copy"], flops_per_second=found["gemm"])


def notes(results: Sequence[suite.Result], kept: Sequence[Row], rates: Rates) -> list[str]:
    """What a table cannot say: ceilings, origin, speeds, absences."""
    lines = [
        f"ceilings: copy {rates.bytes_per_second / 1e9:.0f} GB/s, GEMM {rates.flops_per_second / 1e12:.4g} TFLOP/s",
        *tables.origins(kept),
    ]
    return lines + [line for result in results for line in report.summary(result)]


def _one(name: str, trained: torch.Tensor | None, options: Options) -> suite.Result:
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    made = problem.make(SHAPES[name], dtype, options.device, trained=trained)
    return suite.compare(name, made, device=options.device, budget_ms=options.budget_ms, only=options.arms)


def _write(results: Sequence[suite.Result], kept: Sequence[Row], rates: Rates, options: Options) -> None:
    if options.out is not None:
        rows.write(options.out, kept)
    if options.markdown is not None:
        lines = "\n".join(f"- {line}" for line in notes(results, kept, rates))
        options.markdown.write_text(f"{report.table(results, rates)}\n\n{lines}\n")
    if options.picture is not None:
        picture.draw(kept, options.picture)
